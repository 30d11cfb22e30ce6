// The loops, written once against a vector type `V` and the scalar conversions of convert.h.
//
// `V` has kWidth lanes (a divisor of 16) and static functions load32/load_bf16/load_fp16,
// store32/store_bf16/store_fp16, set1, add, sub, mul, div, sqrt, fma (a b + c, rounded once),
// first_if_nan(a, b, x) (a where x is NaN, else b) and nonfinite (how many lanes are infinite or
// NaN), and a nested type Squares: the 16 fp64 lanes of a sum of squares.
//
// Included inside each kernels_*.cpp file's anonymous namespace (see kernels.h for the reason).

template <int kDType>
struct Element {
  using Type = std::uint16_t;
};
template <>
struct Element<0> {
  using Type = float;
};

template <typename V, int kDType>
inline typename V::Register load(const typename Element<kDType>::Type* from) {
  if constexpr (kDType == 0) {
    return V::load32(from);
  } else if constexpr (kDType == 1) {
    return V::load_bf16(from);
  } else {
    return V::load_fp16(from);
  }
}

template <typename V, int kDType>
inline void store(typename Element<kDType>::Type* to, typename V::Register value) {
  if constexpr (kDType == 0) {
    V::store32(to, value);
  } else if constexpr (kDType == 1) {
    V::store_bf16(to, value);
  } else {
    V::store_fp16(to, value);
  }
}

// x / c for a divisor known beforehand, correctly rounded without the divider, which is what bounds
// a core here: q = x inv(c), then one Newton step on the exact remainder (Markstein, "IA-64 and
// Elementary Functions", 2000, ch. 8). Exact for finite x that are 0 or far from subnormal, unless
// all significand bits of c are ones (then within 1 ulp); an infinite x keeps its q.
template <typename V>
inline typename V::Register divide(typename V::Register x, float c, float inverse) {
  const auto q = V::mul(x, V::set1(inverse));
  const auto remainder = V::fma(q, V::set1(-c), x);
  return V::first_if_nan(q, V::fma(remainder, V::set1(inverse), q), remainder);
}

// One AdamW update of kWidth elements; Loshchilov & Hutter, "Decoupled Weight Decay
// Regularization" (arXiv:1711.05101), in the order of operations of torch.optim.AdamW:
//   p <- p (1 - lr wd);  m <- lerp(m, g, 1 - beta1);  v <- beta2 v + (1 - beta2) g g
//   p <- p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
// fp32 gives the bits of its fused CPU kernel where that uses fused multiply-add too.
template <typename V, int kParam, int kGrad, bool kMaster, bool kRoots, bool kFromM>
inline void update(const AdamWScalars& s, typename Element<kParam>::Type* param,
                   const typename Element<kGrad>::Type* grad, float* exp_avg, float* exp_avg_sq,
                   float* master) {
  const auto g = V::mul(load<V, kGrad>(grad), V::set1(s.grad_scale));
  auto p = kMaster ? V::load32(master) : load<V, kParam>(param);
  auto m = V::load32(exp_avg);
  auto v = V::load32(exp_avg_sq);
  p = V::mul(p, V::set1(s.decay));
  // One rounding here matters: with two, twenty steps end up to 2 ulp from torch's result.
  m = V::fma(V::set1(s.lerp_factor), V::sub(g, m), kFromM ? m : g);
  v = V::fma(V::mul(V::set1(s.one_minus_beta2), g), g, V::mul(v, V::set1(s.beta2)));
  const auto root = V::sqrt(v);
  const auto denominator =
      V::add(divide<V>(root, s.correction2, s.correction2_inverse), V::set1(s.eps));
  p = V::sub(p, V::div(V::mul(V::set1(s.step_size), m), denominator));
  V::store32(exp_avg, m);
  V::store32(exp_avg_sq, kRoots ? root : v);
  if constexpr (kMaster) V::store32(master, p);
  store<V, kParam>(param, p);
}

template <typename V, int kParam, int kGrad, bool kMaster, bool kRoots, bool kFromM>
void adamw_loop(const AdamWScalars& scalars, const AdamWRange& range) {
  // Copies, which no store to the tensors can alias, so that they stay in registers.
  const AdamWScalars s = scalars;
  const AdamWRange r = range;
  auto* param = static_cast<typename Element<kParam>::Type*>(r.param);
  const auto* grad = static_cast<const typename Element<kGrad>::Type*>(r.grad);
  std::size_t i = 0;
  for (; i + V::kWidth <= r.count; i += V::kWidth) {
    update<V, kParam, kGrad, kMaster, kRoots, kFromM>(s, param + i, grad + i, r.exp_avg + i,
                                                  r.exp_avg_sq + i,
                                                  kMaster ? r.master + i : nullptr);
  }
  for (; i < r.count; ++i) {
    update<Scalar, kParam, kGrad, kMaster, kRoots, kFromM>(s, param + i, grad + i, r.exp_avg + i,
                                                       r.exp_avg_sq + i,
                                                       kMaster ? r.master + i : nullptr);
  }
}

template <typename V, int kParam, int kGrad, bool kMaster, bool kRoots>
void adamw(const AdamWScalars& s, const AdamWRange& r) {
  if (s.lerp_from_m) {
    adamw_loop<V, kParam, kGrad, kMaster, kRoots, true>(s, r);
  } else {
    adamw_loop<V, kParam, kGrad, kMaster, kRoots, false>(s, r);
  }
}

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

#define TS_ADAMW(param, grad)                                                              \
  {                                                                                        \
    {adamw<V, param, grad, false, false>, adamw<V, param, grad, false, true>},             \
    {adamw<V, param, grad, true, false>, adamw<V, param, grad, true, true>},               \
  }

template <typename V>
KernelTable make_table() {
  return {{
              {TS_ADAMW(0, 0), TS_ADAMW(0, 1), TS_ADAMW(0, 2)},
              {TS_ADAMW(1, 0), TS_ADAMW(1, 1), TS_ADAMW(1, 2)},
              {TS_ADAMW(2, 0), TS_ADAMW(2, 1), TS_ADAMW(2, 2)},
          },
          {grad_stats<V, 0>, grad_stats<V, 1>, grad_stats<V, 2>},
          {bf16_moments<V>(), int8_moments<V>()},
          rewrite<V>,
          read_through<V>};
}

#undef TS_ADAMW
