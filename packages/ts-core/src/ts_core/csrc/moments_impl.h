// Moments in fewer than 32 bits, to and from fp32: written once against a vector type `V` (see
// kernels_impl.h, and simd_scalar.h for the integer lanes).
//
// "bfloat16": rounded stochastically, to one of the two neighbours, with the probability that makes
// the mean right; an infinite value stays so, a NaN becomes 0x7fc0.
//
// "int8": one byte per value and one fp32 scale per kMomentBlock values. The scale is the power of
// two of the block's largest rounded magnitude, not that magnitude itself: then the numbers that a
// block can hold do not move when its largest value does, so that a value which did not change is
// never rounded a second time (with a scale that moves every step, rounding noise would add up
// from step to step).
//   exp_avg: sign, 3 bits exponent, 4 bits fraction, rounded to nearest even. With scale 2^e it
//     holds 1.0000b 2^(e-6) .. 1.1111b 2^e and, evenly below that, multiples of 2^(e-10).
//   exp_avg_sq: its square root; 4 bits exponent, 4 bits fraction, rounded stochastically:
//     1.0000b 2^(e-14) .. 1.1110b 2^e, and multiples of 2^(e-18) below. A value above zero never
//     becomes zero, since that would let the next step divide by almost nothing.
//   Infinities and NaNs have a code of their own (0x80 in exp_avg, read back as NaN; 0xff in
//   exp_avg_sq, read back as infinity) and no part in the scale: they touch no neighbour.
// e is at least -116 in exp_avg and at least -56 in exp_avg_sq, so that every square is exact.
//
// Included inside each kernels_*.cpp file's anonymous namespace (see kernels.h for the reason).

constexpr int kFraction = 4;
constexpr int kDropped = 23 - kFraction;  // bits of an fp32 fraction that are rounded away
constexpr std::uint32_t kDroppedMask = (1u << kDropped) - 1;
constexpr std::uint32_t kInfinity = 0x7f800000u;
constexpr std::uint32_t kMagnitude = 0x7fffffffu;
constexpr std::uint32_t kLargest = kInfinity - (1u << kDropped);  // of exp_avg
// Of the roots: below 2^64, so that the square is finite.
constexpr std::uint32_t kLargestRoot = ((64u + 127u) << 23) - (1u << kDropped);

inline std::uint64_t mix64(std::uint64_t x) {  // the finalizer of SplitMix64 (Steele et al., 2014)
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// 32 random bits for each element of one block in turn, a function of (key, block, element) alone.
// The low half rounds a bf16 exp_avg, the high half a bf16 exp_avg_sq, the high 19 bits an 8-bit
// exp_avg_sq.
template <typename V>
class RandomWords {
 public:
  RandomWords(std::uint64_t key, std::uint64_t block) {
    const std::uint64_t mixed = mix64(key + block * 0x9e3779b97f4a7c15u);
    low_ = V::set1i(static_cast<std::uint32_t>(mixed));
    high_ = V::set1i(static_cast<std::uint32_t>(mixed >> 32));
    counter_ = V::muli(V::iota(), V::set1i(kOdd));
  }

  typename V::Int next() {
    auto x = V::xori(counter_, low_);
    counter_ = V::addi(counter_, V::set1i(V::kWidth * kOdd));
    x = V::addi(V::muli(V::xori(x, V::template shr<16>(x)), V::set1i(0x7feb352du)), high_);
    x = V::muli(V::xori(x, V::template shr<15>(x)), V::set1i(0x846ca68bu));
    return V::xori(x, V::template shr<16>(x));
  }

 private:
  static constexpr std::uint32_t kOdd = 0x9e3779b1u;
  typename V::Int low_, high_, counter_;
};

template <typename V>
inline std::uint32_t largest(typename V::Int lanes) {
  std::uint32_t values[16];
  V::store_u32(values, lanes);
  std::uint32_t most = 0;
  for (int lane = 0; lane < V::kWidth; ++lane) most = values[lane] > most ? values[lane] : most;
  return most;
}

template <typename V>
inline std::uint32_t largest_finite(const float* values) {
  auto most = V::set1i(0);
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    const auto x = V::andi(V::bits(V::load32(values + i)), V::set1i(kMagnitude));
    most = V::maxi(most, V::keep(V::greater(V::set1i(kInfinity), x), x));
  }
  return largest<V>(most);
}

inline float power_of_two(int exponent) {
  return float_of(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// The fp32 bits of |x| rounded to nearest even.
template <typename V>
inline typename V::Int round_to_nearest(typename V::Int x) {  // with rubbish in the dropped bits
  const auto odd = V::andi(V::template shr<kDropped>(x), V::set1i(1));
  return V::addi(x, V::addi(V::set1i(kDroppedMask >> 1), odd));
}

// kCareful: some value is infinite, NaN, or so large that it may round up to infinity. `peak` holds
// the bits of the largest finite magnitude.
template <typename V, bool kCareful>
void encode_exp_avg_codes(const float* from, std::uint8_t* codes, float* scale,
                          std::uint32_t peak) {
  constexpr int kTop = 7;  // the largest exponent field
  const std::uint32_t rounded_peak = round_to_nearest<Scalar>(peak);
  int exponent = static_cast<int>((rounded_peak < kLargest ? rounded_peak : kLargest) >> 23) - 127;
  if (exponent < kExpAvgLeastExponent) exponent = kExpAvgLeastExponent;
  const auto offset = V::set1i(static_cast<std::uint32_t>(exponent + 127 - kTop) << kFraction);
  const float inverse_step = power_of_two(kTop - 1 + kFraction - exponent);
  // 0 where all round to zero, as in a block that was never written.
  *scale = float_of(peak) * inverse_step > 0.5f ? power_of_two(exponent) : 0.0f;
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    const auto all = V::bits(V::load32(from + i));
    const auto x = V::andi(all, V::set1i(kMagnitude));
    auto rounded = round_to_nearest<V>(x);
    if constexpr (kCareful) rounded = V::mini(rounded, V::set1i(kLargest));
    const auto normal = V::subi(V::template shr<kDropped>(rounded), offset);
    // Adding 2^23 leaves whole numbers; the addition rounds to nearest even.
    const auto shifted = V::add(V::mul(V::from_bits(x), V::set1(inverse_step)),
                                V::set1(8388608.0f));
    const auto small = V::subi(V::bits(shifted), V::set1i(0x4b000000u));
    auto code = V::select(V::greater(normal, V::set1i((1u << kFraction) - 1)), normal, small);
    // A negative zero would be the code of a NaN.
    const auto sign = V::andi(V::template shr<24>(all), V::set1i(0x80));
    code = V::ori(code, V::keep(V::greater(code, V::set1i(0)), sign));
    if constexpr (kCareful) {
      code = V::select(V::greater(V::set1i(kInfinity), x), code, V::set1i(0x80));
    }
    V::store_u8(codes + i, code);
  }
}

template <typename V>
void encode_exp_avg_block(const float* from, std::uint8_t* codes, float* scale) {
  auto most = V::set1i(0);
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    most = V::maxi(most, V::andi(V::bits(V::load32(from + i)), V::set1i(kMagnitude)));
  }
  const std::uint32_t peak = largest<V>(most);
  if (peak <= kLargest) {
    encode_exp_avg_codes<V, false>(from, codes, scale, peak);
  } else {
    encode_exp_avg_codes<V, true>(from, codes, scale, largest_finite<V>(from));
  }
}

template <typename V>
void decode_exp_avg_block(const std::uint8_t* codes, float scale, float* to) {
  constexpr std::uint32_t kTop = 7;
  const auto offset = V::set1i((bits_of(scale) & kInfinity) - (kTop << 23));
  const auto step = V::set1(scale * power_of_two(1 - static_cast<int>(kTop) - kFraction));
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    const auto all = V::load_u8(codes + i);
    const auto code = V::andi(all, V::set1i(0x7f));
    const auto normal = V::addi(V::template shl<kDropped>(code), offset);
    const auto small = V::bits(V::mul(V::to_float(code), step));
    auto x = V::select(V::greater(code, V::set1i((1u << kFraction) - 1)), normal, small);
    x = V::ori(x, V::template shl<24>(V::subi(all, code)));
    x = V::select(V::equal(all, V::set1i(0x80)), V::set1i(0x7fc00000u), x);
    V::store32(to + i, V::from_bits(x));
  }
}

// kCareful: some root is infinite or NaN, or so near a power of two from below that it may round up
// to it. Then the exponent follows from all rounded values; else from `peak`, the largest root.
template <typename V, bool kCareful>
void encode_roots(const std::uint32_t* roots, std::uint8_t* codes, float* scale, std::uint32_t peak,
                  std::uint64_t key, std::uint64_t block) {
  constexpr int kTop = 15;
  constexpr std::uint32_t kReserved = 0xff;
  int exponent = static_cast<int>(peak >> 23) - 127;
  if constexpr (kCareful) {
    RandomWords<V> random(key, block);
    auto most = V::set1i(0);
    for (int i = 0; i < kMomentBlock; i += V::kWidth) {
      const auto x = V::load_u32(roots + i);
      const auto word = V::template shr<32 - kDropped>(random.next());
      const auto rounded = V::mini(V::addi(x, word), V::set1i(kLargestRoot));
      most = V::maxi(most, V::keep(V::greater(V::set1i(kInfinity), x), rounded));
    }
    peak = largest<V>(most) & ~kDroppedMask;
    exponent = static_cast<int>(peak >> 23) - 127;
    if ((peak >> kDropped & 0xf) == 0xf) ++exponent;  // its code would be the reserved one
  }
  if (exponent < kExpAvgSqLeastExponent) exponent = kExpAvgSqLeastExponent;
  *scale = peak != 0 ? power_of_two(exponent) : 0.0f;
  const auto offset = V::set1i(static_cast<std::uint32_t>(exponent + 127 - kTop) << kFraction);
  const auto inverse_step = V::set1(power_of_two(kTop - 1 + kFraction - exponent));
  const auto unit = V::set1(power_of_two(-kDropped));
  RandomWords<V> random(key, block);
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    const auto x = V::load_u32(roots + i);
    const auto word = V::template shr<32 - kDropped>(random.next());
    auto rounded = V::addi(x, word);
    if constexpr (kCareful) rounded = V::mini(rounded, V::set1i(kLargestRoot));
    const auto normal = V::subi(V::template shr<kDropped>(rounded), offset);
    // The sum of a whole number below 16 and 19 bits below 1 is exact, so it stays where it is.
    const auto sum = V::add(V::mul(V::from_bits(x), inverse_step), V::mul(V::to_float(word), unit));
    const auto small = V::maxi(V::truncate(sum), V::mini(x, V::set1i(1)));
    auto code = V::select(V::greater(normal, V::set1i((1u << kFraction) - 1)), normal, small);
    if constexpr (kCareful) {
      code = V::select(V::greater(V::set1i(kInfinity), x), code, V::set1i(kReserved));
    }
    V::store_u8(codes + i, code);
  }
}

// kRoots: `from` holds square roots already.
template <typename V, bool kRoots>
void encode_exp_avg_sq_block(const float* from, std::uint8_t* codes, float* scale,
                             std::uint64_t key, std::uint64_t block) {
  std::uint32_t roots[kMomentBlock];
  auto most = V::set1i(0);
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    const auto value = V::load32(from + i);
    const auto x = V::andi(V::bits(kRoots ? value : V::sqrt(value)), V::set1i(kMagnitude));
    V::store_u32(roots + i, x);
    most = V::maxi(most, x);
  }
  const std::uint32_t peak = largest<V>(most);
  if (peak < kInfinity && (peak >> kDropped & 0xf) < 0xe) {
    encode_roots<V, false>(roots, codes, scale, peak, key, block);
  } else {
    encode_roots<V, true>(roots, codes, scale, peak, key, block);
  }
}

template <typename V>
void decode_exp_avg_sq_block(const std::uint8_t* codes, float scale, float* to) {
  constexpr std::uint32_t kTop = 15;
  const auto offset = V::set1i((bits_of(scale) & kInfinity) - (kTop << 23));
  const auto step = V::set1(scale * power_of_two(1 - static_cast<int>(kTop) - kFraction));
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    const auto code = V::load_u8(codes + i);
    const auto normal = V::addi(V::template shl<kDropped>(code), offset);
    const auto small = V::bits(V::mul(V::to_float(code), step));
    const auto root = V::from_bits(
        V::select(V::greater(code, V::set1i((1u << kFraction) - 1)), normal, small));
    const auto square = V::bits(V::mul(root, root));
    const auto x = V::select(V::equal(code, V::set1i(0xff)), V::set1i(kInfinity), square);
    V::store32(to + i, V::from_bits(x));
  }
}

// kCareful: some value is infinite, NaN, or so large that it may round up to infinity.
template <typename V, bool kSquare, bool kCareful>
std::uint32_t encode_bf16_codes(const float* from, std::uint16_t* to, std::uint64_t key,
                                std::uint64_t block) {
  RandomWords<V> random(key, block);
  auto most = V::set1i(0);
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    const auto all = V::bits(V::load32(from + i));
    const auto words = random.next();
    const auto word = kSquare ? V::template shr<16>(words) : V::andi(words, V::set1i(0xffff));
    const auto x = V::andi(all, V::set1i(kMagnitude));
    most = V::maxi(most, x);
    auto code = V::template shr<16>(V::addi(all, word));
    if constexpr (kCareful) {
      const auto rounded = V::mini(V::template shr<16>(V::addi(x, word)), V::set1i(0x7f7f));
      const auto finite = V::greater(V::set1i(kInfinity), x);
      code = V::ori(V::select(finite, rounded, V::set1i(kInfinity >> 16)),
                    V::andi(V::template shr<16>(all), V::set1i(0x8000)));
      code = V::select(V::greater(x, V::set1i(kInfinity)), V::set1i(0x7fc0), code);
    }
    V::store_u16(to + i, code);
  }
  return largest<V>(most);
}

template <typename V, bool kSquare>
void encode_bf16_block(const float* from, std::uint16_t* to, std::uint64_t key,
                       std::uint64_t block) {
  const std::uint32_t peak = encode_bf16_codes<V, kSquare, false>(from, to, key, block);
  if (peak > 0x7f7f0000u) encode_bf16_codes<V, kSquare, true>(from, to, key, block);
}

template <typename V>
void decode_bf16_block(const std::uint16_t* from, float* to) {
  for (int i = 0; i < kMomentBlock; i += V::kWidth) V::store32(to + i, V::load_bf16(from + i));
}

// --- the tables' entries: `count` values from the start of a block; the last may be partial ------

template <typename V, bool kSquare>
void decode_int8(const void* codes, const float* scales, float* to, std::size_t count) {
  const auto* from = static_cast<const std::uint8_t*>(codes);
  for (std::size_t at = 0; at < count; at += kMomentBlock, ++scales) {
    const std::size_t rest = count - at;
    std::uint8_t padded[kMomentBlock];
    const std::uint8_t* source = from + at;
    if (rest < kMomentBlock) {
      memset(padded, 0, sizeof padded);
      memcpy(padded, source, rest);
      source = padded;
    }
    float values[kMomentBlock];
    float* target = rest < kMomentBlock ? values : to + at;
    if constexpr (kSquare) {
      decode_exp_avg_sq_block<V>(source, read(scales), target);
    } else {
      decode_exp_avg_block<V>(source, read(scales), target);
    }
    if (rest < kMomentBlock) memcpy(to + at, values, rest * sizeof(float));
  }
}

template <typename V, bool kSquare, bool kRoots = false>
void encode_int8(const float* from, void* codes, float* scales, std::size_t count,
                 std::uint64_t key, std::uint64_t block) {
  auto* to = static_cast<std::uint8_t*>(codes);
  for (std::size_t at = 0; at < count; at += kMomentBlock, ++scales, ++block) {
    const std::size_t rest = count - at;
    float padded[kMomentBlock];
    std::uint8_t bytes[kMomentBlock];
    const float* source = from + at;
    std::uint8_t* target = to + at;
    if (rest < kMomentBlock) {
      memset(padded, 0, sizeof padded);
      memcpy(padded, source, rest * sizeof(float));
      source = padded;
      target = bytes;
    }
    float scale;
    if constexpr (kSquare) {
      encode_exp_avg_sq_block<V, kRoots>(source, target, &scale, key, block);
    } else {
      encode_exp_avg_block<V>(source, target, &scale);
    }
    write(scales, scale);
    if (rest < kMomentBlock) memcpy(to + at, bytes, rest);
  }
}

template <typename V>
void decode_bf16(const void* values, const float*, float* to, std::size_t count) {
  const auto* from = static_cast<const std::uint16_t*>(values);
  std::size_t at = 0;
  for (; at + kMomentBlock <= count; at += kMomentBlock) decode_bf16_block<V>(from + at, to + at);
  for (; at < count; ++at) to[at] = Scalar::load_bf16(from + at);
}

template <typename V, bool kSquare>
void encode_bf16(const float* from, void* values, float*, std::size_t count, std::uint64_t key,
                 std::uint64_t block) {
  auto* to = static_cast<std::uint16_t*>(values);
  for (std::size_t at = 0; at < count; at += kMomentBlock, ++block) {
    const std::size_t rest = count - at;
    if (rest >= kMomentBlock) {
      encode_bf16_block<V, kSquare>(from + at, to + at, key, block);
      continue;
    }
    float padded[kMomentBlock] = {};
    std::uint16_t words[kMomentBlock];
    memcpy(padded, from + at, rest * sizeof(float));
    encode_bf16_block<V, kSquare>(padded, words, key, block);
    memcpy(to + at, words, rest * sizeof(std::uint16_t));
  }
}

template <typename V>
MomentKernels bf16_moments() {
  return {{decode_bf16<V>, decode_bf16<V>}, {encode_bf16<V, false>, encode_bf16<V, true>},
          nullptr};
}

template <typename V>
MomentKernels int8_moments() {
  return {{decode_int8<V, false>, decode_int8<V, true>},
          {encode_int8<V, false>, encode_int8<V, true>},
          encode_int8<V, true, true>};
}
