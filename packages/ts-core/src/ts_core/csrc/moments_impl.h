// Moments in bf16, to and from fp32, and what 8-bit ones (int8_impl.h) share with them: written
// once against a vector type `V` (see kernels_impl.h, and simd_scalar.h for the integer lanes).
//
// "bfloat16": rounded stochastically, to one of the two neighbours, with the probability that makes
// the mean right; an infinite value stays so, a NaN becomes 0x7fc0.
//
// Included inside each kernels_*.cpp file's anonymous namespace (see kernels.h for the reason).

constexpr std::uint32_t kInfinity = 0x7f800000u;
constexpr std::uint32_t kMagnitude = 0x7fffffffu;
// Above it a stochastically rounded bf16 may become infinite.
constexpr std::uint32_t kLargestBf16 = 0x7f7f0000u;

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

// The fp32 bits of |x|.
template <typename V>
inline typename V::Int magnitude(typename V::Register x) {
  return V::andi(V::bits(x), V::set1i(kMagnitude));
}

template <typename V>
inline std::uint32_t largest(typename V::Int lanes) {
  std::uint32_t values[16];
  V::store_u32(values, lanes);
  std::uint32_t most = 0;
  for (int lane = 0; lane < V::kWidth; ++lane) most = values[lane] > most ? values[lane] : most;
  return most;
}

template <typename V>
inline std::uint32_t least(typename V::Int lanes) {  // of magnitudes
  return kMagnitude - largest<V>(V::subi(V::set1i(kMagnitude), lanes));
}

// `words`: random bits of kWidth elements.
template <typename V, bool kSquare>
inline void store_rounded(std::uint16_t* to, typename V::Int all, typename V::Int words) {
  const auto word = kSquare ? V::template shr<16>(words) : V::andi(words, V::set1i(0xffff));
  V::store_u16(to, V::template shr<16>(V::addi(all, word)));
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
    const auto x = V::andi(all, V::set1i(kMagnitude));
    most = V::maxi(most, x);
    if constexpr (!kCareful) {
      store_rounded<V, kSquare>(to + i, all, words);
    } else {
      const auto word = kSquare ? V::template shr<16>(words) : V::andi(words, V::set1i(0xffff));
      const auto rounded =
          V::mini(V::template shr<16>(V::addi(x, word)), V::set1i(kLargestBf16 >> 16));
      const auto finite = V::greater(V::set1i(kInfinity), x);
      auto code = V::ori(V::select(finite, rounded, V::set1i(kInfinity >> 16)),
                         V::andi(V::template shr<16>(all), V::set1i(0x8000)));
      code = V::select(V::greater(x, V::set1i(kInfinity)), V::set1i(0x7fc0), code);
      V::store_u16(to + i, code);
    }
  }
  return largest<V>(most);
}

template <typename V, bool kSquare>
void encode_bf16_block(const float* from, std::uint16_t* to, std::uint64_t key,
                       std::uint64_t block) {
  const std::uint32_t peak = encode_bf16_codes<V, kSquare, false>(from, to, key, block);
  if (peak > kLargestBf16) encode_bf16_codes<V, kSquare, true>(from, to, key, block);
}

template <typename V>
void decode_bf16_block(const std::uint16_t* from, float* to) {
  for (int i = 0; i < kMomentBlock; i += V::kWidth) V::store32(to + i, V::load_bf16(from + i));
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
  return {{decode_bf16<V>, decode_bf16<V>}, {encode_bf16<V, false>, encode_bf16<V, true>}};
}

