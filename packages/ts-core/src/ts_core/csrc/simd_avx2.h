// Eight lanes: AVX2, FMA and F16C.
//
// Included inside kernels_avx2.cpp's anonymous namespace (see kernels.h for the reason).

struct Avx2 {
  using Register = __m256;
  static constexpr int kWidth = 8;

  static __m256 load32(const float* from) { return _mm256_loadu_ps(from); }
  static __m256 load_bf16(const std::uint16_t* from) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static __m256 load_fp16(const std::uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void store32(float* to, __m256 value) { _mm256_storeu_ps(to, value); }
  static void store_bf16(std::uint16_t* to, __m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i result = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(result),
                                            _mm256_extracti128_si256(result, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
  }
  static void store_fp16(std::uint16_t* to, __m256 value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }

  static __m256 set1(float value) { return _mm256_set1_ps(value); }
  static __m256 add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
  static __m256 sub(__m256 a, __m256 b) { return _mm256_sub_ps(a, b); }
  static __m256 mul(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
  static __m256 div(__m256 a, __m256 b) { return _mm256_div_ps(a, b); }
  static __m256 sqrt(__m256 a) { return _mm256_sqrt_ps(a); }
  static __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
  static __m256 first_if_nan(__m256 a, __m256 b, __m256 x) {
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }
  static unsigned nonfinite(__m256 a) {
    const __m256i exponent = _mm256_set1_epi32(0x7f800000);
    const __m256i same =
        _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(a), exponent), exponent);
    unsigned mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(same)));
    unsigned count = 0;
    for (; mask != 0; mask &= mask - 1) ++count;
    return count;
  }

  static void prefetch(const void* at) {
    _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0);
  }

  // Integer lanes: unsigned 32 bits unless said otherwise.
  using Int = __m256i;
  static __m256i bits(__m256 a) { return _mm256_castps_si256(a); }
  static __m256 from_bits(__m256i a) { return _mm256_castsi256_ps(a); }
  static __m256i set1i(std::uint32_t a) { return _mm256_set1_epi32(static_cast<int>(a)); }
  static __m256i iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  static __m256i addi(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
  static __m256i subi(__m256i a, __m256i b) { return _mm256_sub_epi32(a, b); }
  static __m256i muli(__m256i a, __m256i b) { return _mm256_mullo_epi32(a, b); }
  static __m256i andi(__m256i a, __m256i b) { return _mm256_and_si256(a, b); }
  static __m256i ori(__m256i a, __m256i b) { return _mm256_or_si256(a, b); }
  static __m256i xori(__m256i a, __m256i b) { return _mm256_xor_si256(a, b); }
  template <int kBits>
  static __m256i shl(__m256i a) { return _mm256_slli_epi32(a, kBits); }
  template <int kBits>
  static __m256i shr(__m256i a) { return _mm256_srli_epi32(a, kBits); }
  static __m256i greater(__m256i a, __m256i b) { return _mm256_cmpgt_epi32(a, b); }
  static __m256i equal(__m256i a, __m256i b) { return _mm256_cmpeq_epi32(a, b); }
  static __m256i select(__m256i where, __m256i a, __m256i b) {
    return _mm256_blendv_epi8(b, a, where);
  }
  static __m256i keep(__m256i where, __m256i a) { return _mm256_and_si256(where, a); }
  static __m256i maxi(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }
  static __m256i mini(__m256i a, __m256i b) { return _mm256_min_epi32(a, b); }
  static __m256 to_float(__m256i a) { return _mm256_cvtepi32_ps(a); }
  static __m256i truncate(__m256 a) { return _mm256_cvttps_epi32(a); }
  static __m256i load_u8(const std::uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
  static void store_u8(std::uint8_t* to, __m256i a) {
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(a),
                                           _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
  }
  static void store_u16(std::uint16_t* to, __m256i a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
  }
  static void store_u32(std::uint32_t* to, __m256i a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a);
  }
  static __m256i load_u32(const std::uint32_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }

  struct Squares {
    __m256d lanes[4];
    explicit Squares(const double* from) {
      for (int i = 0; i < 4; ++i) lanes[i] = _mm256_loadu_pd(from + 4 * i);
    }
    static __m256d plus_square(__m256d sum, __m128 values) {
      const __m256d wide = _mm256_cvtps_pd(values);
      return _mm256_add_pd(sum, _mm256_mul_pd(wide, wide));
    }
    void add(const __m256* group) {
      for (int i = 0; i < 2; ++i) {
        lanes[2 * i] = plus_square(lanes[2 * i], _mm256_castps256_ps128(group[i]));
        lanes[2 * i + 1] = plus_square(lanes[2 * i + 1], _mm256_extractf128_ps(group[i], 1));
      }
    }
    void store(double* to) const {
      for (int i = 0; i < 4; ++i) _mm256_storeu_pd(to + 4 * i, lanes[i]);
    }
  };
};
