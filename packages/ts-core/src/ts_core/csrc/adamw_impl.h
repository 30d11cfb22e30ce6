// The update, written once against a vector type `V` (see kernels_impl.h): with moments in fp32, in
// bf16, and in 8 bits.
//
// Moments that are not fp32 are expanded, updated and rounded a block at a time, which stays in the
// first-level cache. The loop with a square root and a division in it does little else, so that
// a core has many of them under way at once. The parameter sees the new moments in fp32.
//
// Included inside each kernels_*.cpp file's anonymous namespace (see kernels.h for the reason).

// Types of moments: the index of the kernels' table.
constexpr int kFloat32 = 0;
constexpr int kBfloat16 = 1;
constexpr int kInt8 = 2;

template <int kMoments>
struct MomentElement {
  using Type = float;
};
template <>
struct MomentElement<kBfloat16> {
  using Type = std::uint16_t;
};
template <>
struct MomentElement<kInt8> {
  using Type = std::uint8_t;
};

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
// fp32 gives the bits of its fused CPU kernel where that uses fused multiply-add too. Returns
// sqrt(v).
template <typename V, int kParam, int kGrad, bool kMaster, bool kFromM>
inline typename V::Register update(const AdamWScalars& s, typename Element<kParam>::Type* param,
                                   const typename Element<kGrad>::Type* grad, float* master,
                                   typename V::Register& m, typename V::Register& v) {
  const auto g = V::mul(load<V, kGrad>(grad), V::set1(s.grad_scale));
  auto p = kMaster ? V::load32(master) : load<V, kParam>(param);
  p = V::mul(p, V::set1(s.decay));
  // One rounding here matters: with two, twenty steps end up to 2 ulp from torch's result.
  m = V::fma(V::set1(s.lerp_factor), V::sub(g, m), kFromM ? m : g);
  v = V::fma(V::mul(V::set1(s.one_minus_beta2), g), g, V::mul(v, V::set1(s.beta2)));
  const auto root = V::sqrt(v);
  const auto denominator =
      V::add(divide<V>(root, s.correction2, s.correction2_inverse), V::set1(s.eps));
  p = V::sub(p, V::div(V::mul(V::set1(s.step_size), m), denominator));
  if constexpr (kMaster) V::store32(master, p);
  store<V, kParam>(param, p);
  return root;
}

// What an update reads and writes, from one element on.
template <int kParam, int kGrad, int kMoments>
struct Tensors {
  using Param = typename Element<kParam>::Type;
  using Grad = typename Element<kGrad>::Type;
  using Moment = typename MomentElement<kMoments>::Type;
  Param* param;
  const Grad* grad;
  float* master;  // or null
  Moment* exp_avg;
  Moment* exp_avg_sq;
};

template <typename V, int kParam, int kGrad, bool kMaster, bool kFromM>
inline void update_fp32(const AdamWScalars& s, const Tensors<kParam, kGrad, kFloat32>& t,
                        std::size_t i) {
  auto m = V::load32(t.exp_avg + i);
  auto v = V::load32(t.exp_avg_sq + i);
  update<V, kParam, kGrad, kMaster, kFromM>(s, t.param + i, t.grad + i,
                                            kMaster ? t.master + i : nullptr, m, v);
  V::store32(t.exp_avg + i, m);
  V::store32(t.exp_avg_sq + i, v);
}

// Asks for what a block two further on reads. A core's own prefetcher loses the thread where a loop
// over one tensor's block follows a loop over another's.
template <typename V, bool kMaster, typename T>
inline void prefetch(const T& t, int i) {
  constexpr int kAhead = 2 * kMomentBlock;
  V::prefetch(t.param + i + kAhead);
  V::prefetch(t.grad + i + kAhead);
  V::prefetch(t.exp_avg + i + kAhead);
  V::prefetch(t.exp_avg_sq + i + kAhead);
  if constexpr (kMaster) V::prefetch(t.master + i + kAhead);
}

// One block of bf16 moments; `key` and `block` pick the random bits. (Scalars and pointers by value
// here and below: no store can alias a copy, so that they stay in registers.)
template <typename V, int kParam, int kGrad, bool kMaster, bool kFromM>
void update_block(AdamWScalars s, Tensors<kParam, kGrad, kBfloat16> t, float*, float*,
                  std::uint64_t key, std::uint64_t block) {
  alignas(64) float exp_avg[kMomentBlock];
  alignas(64) float exp_avg_sq[kMomentBlock];
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    prefetch<V, kMaster>(t, i);
    auto m = V::load_bf16(t.exp_avg + i);
    auto v = V::load_bf16(t.exp_avg_sq + i);
    update<V, kParam, kGrad, kMaster, kFromM>(s, t.param + i, t.grad + i,
                                              kMaster ? t.master + i : nullptr, m, v);
    V::store32(exp_avg + i, m);
    V::store32(exp_avg_sq + i, v);
  }
  RandomWords<V> random(key, block);
  auto most = V::set1i(0);
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    const auto m = V::load32(exp_avg + i);
    const auto v = V::load32(exp_avg_sq + i);
    const auto words = random.next();
    store_rounded<V, false>(t.exp_avg + i, V::bits(m), words);
    store_rounded<V, true>(t.exp_avg_sq + i, V::bits(v), words);
    most = V::maxi(most, V::maxi(magnitude<V>(m), magnitude<V>(v)));
  }
  if (largest<V>(most) > kLargestBf16) {
    encode_bf16_codes<V, false, true>(exp_avg, t.exp_avg, key, block);
    encode_bf16_codes<V, true, true>(exp_avg_sq, t.exp_avg_sq, key, block);
  }
}

// One block of 8-bit moments and its two scales.
template <typename V, int kParam, int kGrad, bool kMaster, bool kFromM>
void update_block(AdamWScalars s, Tensors<kParam, kGrad, kInt8> t, float* exp_avg_scale,
                  float* exp_avg_sq_scale, std::uint64_t key, std::uint64_t block) {
  alignas(64) float exp_avg[kMomentBlock];
  alignas(64) float exp_avg_sq[kMomentBlock];
  alignas(64) std::uint32_t roots[kMomentBlock];
  decode_block<V>(t.exp_avg, ExpAvgDecoder<V>(read(exp_avg_scale)), exp_avg);
  decode_block<V>(t.exp_avg_sq, ExpAvgSqDecoder<V>(read(exp_avg_sq_scale)), exp_avg_sq);
  auto most = V::set1i(0);
  auto most_root = V::set1i(0);
  auto least_root = V::set1i(kMagnitude);
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    prefetch<V, kMaster>(t, i);
    auto m = V::load32(exp_avg + i);
    auto v = V::load32(exp_avg_sq + i);
    const auto root = magnitude<V>(update<V, kParam, kGrad, kMaster, kFromM>(
        s, t.param + i, t.grad + i, kMaster ? t.master + i : nullptr, m, v));
    V::store32(exp_avg + i, m);
    V::store_u32(roots + i, root);
    most = V::maxi(most, magnitude<V>(m));
    most_root = V::maxi(most_root, root);
    least_root = V::mini(least_root, root);
  }
  write(exp_avg_scale, encode_exp_avg_block<V>(exp_avg, t.exp_avg, largest<V>(most)));
  write(exp_avg_sq_scale,
        encode_roots_block<V>(roots, t.exp_avg_sq, largest<V>(most_root), least<V>(least_root), key,
                              block));
}

// The last elements of a tensor, fewer than a block: in a block of their own, filled up with zeros.
template <typename V, int kMoments, int kParam, int kGrad, bool kMaster, bool kFromM>
void update_rest(const AdamWScalars& s, const Tensors<kParam, kGrad, kMoments>& t, std::size_t rest,
                 float* exp_avg_scale, float* exp_avg_sq_scale, std::uint64_t key,
                 std::uint64_t block) {
  using T = Tensors<kParam, kGrad, kMoments>;
  typename T::Param param[kMomentBlock] = {};
  typename T::Grad grad[kMomentBlock] = {};
  typename T::Moment exp_avg[kMomentBlock] = {};
  typename T::Moment exp_avg_sq[kMomentBlock] = {};
  float master[kMomentBlock] = {};
  memcpy(param, t.param, rest * sizeof param[0]);
  memcpy(grad, t.grad, rest * sizeof grad[0]);
  memcpy(exp_avg, t.exp_avg, rest * sizeof exp_avg[0]);
  memcpy(exp_avg_sq, t.exp_avg_sq, rest * sizeof exp_avg_sq[0]);
  if constexpr (kMaster) memcpy(master, t.master, rest * sizeof master[0]);
  update_block<V, kParam, kGrad, kMaster, kFromM>(s, T{param, grad, master, exp_avg, exp_avg_sq},
                                                  exp_avg_scale, exp_avg_sq_scale, key, block);
  memcpy(t.param, param, rest * sizeof param[0]);
  memcpy(t.exp_avg, exp_avg, rest * sizeof exp_avg[0]);
  memcpy(t.exp_avg_sq, exp_avg_sq, rest * sizeof exp_avg_sq[0]);
  if constexpr (kMaster) memcpy(t.master, master, rest * sizeof master[0]);
}

template <typename V, int kMoments, int kParam, int kGrad, bool kMaster, bool kFromM>
void adamw_loop(const AdamWScalars& scalars, const AdamWRange& range) {
  // Copies, which no store to the tensors can alias, so that they stay in registers.
  const AdamWScalars s = scalars;
  const AdamWRange r = range;
  using T = Tensors<kParam, kGrad, kMoments>;
  const T t{static_cast<typename T::Param*>(r.param), static_cast<const typename T::Grad*>(r.grad),
            r.master, static_cast<typename T::Moment*>(r.exp_avg),
            static_cast<typename T::Moment*>(r.exp_avg_sq)};
  std::size_t i = 0;
  if constexpr (kMoments == kFloat32) {
    for (; i + V::kWidth <= r.count; i += V::kWidth) {
      update_fp32<V, kParam, kGrad, kMaster, kFromM>(s, t, i);
    }
    for (; i < r.count; ++i) update_fp32<Scalar, kParam, kGrad, kMaster, kFromM>(s, t, i);
  } else {
    float* exp_avg_scale = r.exp_avg_scales;
    float* exp_avg_sq_scale = r.exp_avg_sq_scales;
    for (std::uint64_t block = r.block; i < r.count; i += kMomentBlock, ++block) {
      const T at{t.param + i, t.grad + i, kMaster ? t.master + i : nullptr, t.exp_avg + i,
                 t.exp_avg_sq + i};
      if (r.count - i >= kMomentBlock) {
        update_block<V, kParam, kGrad, kMaster, kFromM>(s, at, exp_avg_scale, exp_avg_sq_scale,
                                                        r.key, block);
      } else {
        update_rest<V, kMoments, kParam, kGrad, kMaster, kFromM>(
            s, at, r.count - i, exp_avg_scale, exp_avg_sq_scale, r.key, block);
      }
      if constexpr (kMoments == kInt8) {
        ++exp_avg_scale;
        ++exp_avg_sq_scale;
      }
    }
  }
}

template <typename V, int kMoments, int kParam, int kGrad, bool kMaster>
void adamw(const AdamWScalars& s, const AdamWRange& r) {
  if (s.lerp_from_m) {
    adamw_loop<V, kMoments, kParam, kGrad, kMaster, true>(s, r);
  } else {
    adamw_loop<V, kMoments, kParam, kGrad, kMaster, false>(s, r);
  }
}
