// Moments in 8 bits, to and from fp32: written once against a vector type `V`.
//
// One byte per value and one fp32 scale per kMomentBlock values. The scale is the power of two of
// the block's largest rounded magnitude, not that magnitude itself: then the numbers that a block
// can hold do not move when its largest value does, so that a value which did not change is never
// rounded a second time (with a scale that moves every step, rounding noise would add up).
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
constexpr std::uint32_t kLargest = kInfinity - (1u << kDropped);  // of exp_avg
// Of the roots: below 2^64, so that the square is finite.
constexpr std::uint32_t kLargestRoot = ((64u + 127u) << 23) - (1u << kDropped);

template <typename V>
inline std::uint32_t largest_finite(const float* values) {
  auto most = V::set1i(0);
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    const auto x = magnitude<V>(V::load32(values + i));
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
// the bits of the largest finite magnitude. Returns the scale.
template <typename V, bool kCareful>
float encode_exp_avg_codes(const float* from, std::uint8_t* codes, std::uint32_t peak) {
  constexpr int kTop = 7;  // the largest exponent field
  const std::uint32_t rounded_peak = round_to_nearest<Scalar>(peak);
  int exponent = static_cast<int>((rounded_peak < kLargest ? rounded_peak : kLargest) >> 23) - 127;
  if (exponent < kExpAvgLeastExponent) exponent = kExpAvgLeastExponent;
  const auto offset = V::set1i(static_cast<std::uint32_t>(exponent + 127 - kTop) << kFraction);
  const float inverse_step = power_of_two(kTop - 1 + kFraction - exponent);
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
  // 0 where all round to zero, as in a block that was never written.
  return float_of(peak) * inverse_step > 0.5f ? power_of_two(exponent) : 0.0f;
}

// `peak`: the bits of the largest magnitude, a NaN's among them. Returns the scale.
template <typename V>
float encode_exp_avg_block(const float* from, std::uint8_t* codes, std::uint32_t peak) {
  return peak <= kLargest
             ? encode_exp_avg_codes<V, false>(from, codes, peak)
             : encode_exp_avg_codes<V, true>(from, codes, largest_finite<V>(from));
}

// The numbers of a block by their codes, without sign; kTop is the largest exponent field.
template <typename V, std::uint32_t kTop>
class SmallFloats {
 public:
  explicit SmallFloats(float scale)
      : offset_(V::set1i((bits_of(scale) & kInfinity) - (kTop << 23))),
        step_(V::set1(scale * power_of_two(1 - static_cast<int>(kTop) - kFraction))) {}

  // The fp32 bits.
  typename V::Int operator()(typename V::Int code) const {
    const auto normal = V::addi(V::template shl<kDropped>(code), offset_);
    const auto small = V::bits(V::mul(V::to_float(code), step_));
    return V::select(V::greater(code, V::set1i((1u << kFraction) - 1)), normal, small);
  }

 private:
  typename V::Int offset_;
  typename V::Register step_;
};

template <typename V>
class ExpAvgDecoder {  // of the codes of a block
 public:
  explicit ExpAvgDecoder(float scale) : numbers_(scale) {}

  typename V::Register operator()(typename V::Int all) const {
    const auto code = V::andi(all, V::set1i(0x7f));
    auto x = V::ori(numbers_(code), V::template shl<24>(V::subi(all, code)));
    x = V::select(V::equal(all, V::set1i(0x80)), V::set1i(0x7fc00000u), x);
    return V::from_bits(x);
  }

 private:
  SmallFloats<V, 7> numbers_;
};

// kCareful: some root is infinite or NaN, or so near a power of two from below that it may round up
// to it. Then the exponent follows from all rounded values; else from `peak`, the largest root.
// kSmall: some root may be below the numbers with an exponent of their own. Returns the scale.
template <typename V, bool kCareful, bool kSmall>
float encode_roots(const std::uint32_t* roots, std::uint8_t* codes, std::uint32_t peak,
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
  const auto offset = V::set1i(static_cast<std::uint32_t>(exponent + 127 - kTop) << kFraction);
  const auto inverse_step = V::set1(power_of_two(kTop - 1 + kFraction - exponent));
  const auto unit = V::set1(power_of_two(-kDropped));
  RandomWords<V> random(key, block);
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    const auto x = V::load_u32(roots + i);
    const auto word = V::template shr<32 - kDropped>(random.next());
    auto rounded = V::addi(x, word);
    if constexpr (kCareful) rounded = V::mini(rounded, V::set1i(kLargestRoot));
    auto code = V::subi(V::template shr<kDropped>(rounded), offset);
    if constexpr (kSmall) {
      // The sum of a whole number below 16 and 19 bits below 1 is exact, so it stays where it is.
      const auto sum =
          V::add(V::mul(V::from_bits(x), inverse_step), V::mul(V::to_float(word), unit));
      const auto small = V::maxi(V::truncate(sum), V::mini(x, V::set1i(1)));
      code = V::select(V::greater(code, V::set1i((1u << kFraction) - 1)), code, small);
    }
    if constexpr (kCareful) {
      code = V::select(V::greater(V::set1i(kInfinity), x), code, V::set1i(kReserved));
    }
    V::store_u8(codes + i, code);
  }
  return peak != 0 ? power_of_two(exponent) : 0.0f;
}

// The bits of square roots without their signs; `peak` is the largest, `least` none is below.
// Returns the scale.
template <typename V>
float encode_roots_block(const std::uint32_t* roots, std::uint8_t* codes, std::uint32_t peak,
                         std::uint32_t least, std::uint64_t key, std::uint64_t block) {
  if (peak >= kInfinity || (peak >> kDropped & 0xf) >= 0xe) {
    return encode_roots<V, true, true>(roots, codes, peak, key, block);
  }
  // 2^(e-14) is the least number with an exponent of its own; a least e is left to the general case.
  const bool small = (peak >> 23) < static_cast<std::uint32_t>(kExpAvgSqLeastExponent + 127) ||
                     (least >> 23) + 14 < (peak >> 23);
  return small ? encode_roots<V, false, true>(roots, codes, peak, key, block)
               : encode_roots<V, false, false>(roots, codes, peak, key, block);
}

template <typename V>
class ExpAvgSqDecoder {  // of the codes of a block
 public:
  explicit ExpAvgSqDecoder(float scale) : numbers_(scale) {}

  typename V::Register operator()(typename V::Int code) const {
    const auto root = V::from_bits(numbers_(code));
    const auto square = V::bits(V::mul(root, root));
    return V::from_bits(V::select(V::equal(code, V::set1i(0xff)), V::set1i(kInfinity), square));
  }

 private:
  SmallFloats<V, 15> numbers_;
};

template <typename V, typename Decoder>
void decode_block(const std::uint8_t* codes, Decoder decoded, float* to) {
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    V::store32(to + i, decoded(V::load_u8(codes + i)));
  }
}

// --- the table's entries: `count` values from the start of a block; the last may be partial ---

template <typename V, typename Decoder>
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
    decode_block<V>(source, Decoder(read(scales)), target);
    if (rest < kMomentBlock) memcpy(to + at, values, rest * sizeof(float));
  }
}

template <typename V>
float encode_exp_avg_sq_block(const float* from, std::uint8_t* codes, std::uint64_t key,
                              std::uint64_t block) {
  std::uint32_t roots[kMomentBlock];
  auto most = V::set1i(0);
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    const auto root = magnitude<V>(V::sqrt(V::load32(from + i)));
    V::store_u32(roots + i, root);
    most = V::maxi(most, root);
  }
  return encode_roots_block<V>(roots, codes, largest<V>(most), 0, key, block);
}

template <typename V>
float encode_exp_avg_block(const float* from, std::uint8_t* codes) {
  auto most = V::set1i(0);
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    most = V::maxi(most, magnitude<V>(V::load32(from + i)));
  }
  return encode_exp_avg_block<V>(from, codes, largest<V>(most));
}

template <typename V, bool kSquare>
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
    if constexpr (kSquare) {
      write(scales, encode_exp_avg_sq_block<V>(source, target, key, block));
    } else {
      write(scales, encode_exp_avg_block<V>(source, target));
    }
    if (rest < kMomentBlock) memcpy(to + at, bytes, rest);
  }
}

template <typename V>
MomentKernels int8_moments() {
  return {{decode_int8<V, ExpAvgDecoder<V>>, decode_int8<V, ExpAvgSqDecoder<V>>},
          {encode_int8<V, false>, encode_int8<V, true>}};
}
