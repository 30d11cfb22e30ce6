// The loops, written once against a vector type `V` and the scalar conversions of convert.h.
//
// `V` has kWidth lanes (a divisor of 16) and static functions load32/load_bf16/load_fp16,
// store32/store_bf16/store_fp16, set1, add, sub, mul, div, sqrt, fma (a b + c, rounded once),
// first_if_nan(a, b, x) (a where x is NaN, else b), nonfinite (how many lanes are infinite or NaN)
// and prefetch (of memory that is read soon; any address will do), and a nested type Squares: the
// 16 fp64 lanes of a sum of squares.
//
// Included inside each kernels_*.cpp file's anonymous namespace (see kernels.h for the reason).

template <typename V, int kGrad>
void grad_stats(const void* pointer, std::size_t count, GradSums& sums) {
  const auto* grad = static_cast<const typename Element<kGrad>::Type*>(pointer);
  typename V::Squares squares(sums.squares);
  std::uint64_t nonfinite = 0;
  std::size_t i = 0;
  for (; i + kSquareLanes <= count; i += kSquareLanes) {
    typename V::Register group[kSquareLanes / V::kWidth];
    for (int part = 0; part < kSquareLanes / V::kWidth; ++part) {
      group[part] = load<V, kGrad>(grad + i + part * V::kWidth);
      nonfinite += V::nonfinite(group[part]);
    }
    squares.add(group);
  }
  squares.store(sums.squares);
  for (int lane = 0; i < count; ++i, ++lane) {
    const float value = load<Scalar, kGrad>(grad + i);
    nonfinite += Scalar::nonfinite(value);
    sums.squares[lane] += static_cast<double>(value) * static_cast<double>(value);
  }
  sums.nonfinite += nonfinite;
}

template <typename V>
void rewrite(void* bytes, std::size_t count, std::uint8_t flip) {
  constexpr std::size_t kStep = 4 * V::kWidth;
  auto* at = static_cast<std::uint8_t*>(bytes);
  const auto mask = V::set1i(flip * 0x01010101u);
  for (; count >= kStep; count -= kStep, at += kStep) {
    auto* words = reinterpret_cast<std::uint32_t*>(at);
    V::store_u32(words, V::xori(V::load_u32(words), mask));
  }
  for (; count > 0; --count, ++at) *at = static_cast<std::uint8_t>(*at ^ flip);
}

template <typename V>
std::uint32_t read_through(const void* bytes, std::size_t count) {
  constexpr std::size_t kStep = 4 * V::kWidth;
  const auto* at = static_cast<const std::uint8_t*>(bytes);
  auto seen = V::set1i(0);
  for (; count >= kStep; count -= kStep, at += kStep) {
    seen = V::xori(seen, V::load_u32(reinterpret_cast<const std::uint32_t*>(at)));
  }
  std::uint32_t rest = 0;
  for (; count > 0; --count, ++at) rest ^= *at;
  return largest<V>(V::andi(seen, V::set1i(kMagnitude))) ^ rest;
}

#define TS_ADAMW(moments, param, grad) \
  { adamw<V, moments, param, grad, false>, adamw<V, moments, param, grad, true> }
#define TS_ADAMW_OF(moments)                                                                \
  {                                                                                         \
    {TS_ADAMW(moments, 0, 0), TS_ADAMW(moments, 0, 1), TS_ADAMW(moments, 0, 2)},            \
    {TS_ADAMW(moments, 1, 0), TS_ADAMW(moments, 1, 1), TS_ADAMW(moments, 1, 2)},            \
    {TS_ADAMW(moments, 2, 0), TS_ADAMW(moments, 2, 1), TS_ADAMW(moments, 2, 2)},            \
  }

template <typename V>
KernelTable make_table() {
  return {{TS_ADAMW_OF(kFloat32), TS_ADAMW_OF(kBfloat16), TS_ADAMW_OF(kInt8)},
          {grad_stats<V, 0>, grad_stats<V, 1>, grad_stats<V, 2>},
          {bf16_moments<V>(), int8_moments<V>()},
          rewrite<V>,
          read_through<V>};
}

#undef TS_ADAMW_OF
#undef TS_ADAMW
