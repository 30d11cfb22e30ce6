// Sixteen lanes: AVX-512F. (The bf16 instructions of later chips flush subnormal numbers, which
// the other levels do not, so they are not used.)
//
// Included inside kernels_avx512.cpp's anonymous namespace (see kernels.h for the reason).

struct Avx512 {
  using Register = __m512;
  static constexpr int kWidth = 16;

  static __m512 load32(const float* from) { return _mm512_loadu_ps(from); }
  static __m512 load_bf16(const std::uint16_t* from) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static __m512 load_fp16(const std::uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static void store32(float* to, __m512 value) { _mm512_storeu_ps(to, value); }
  static void store_bf16(std::uint16_t* to, __m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i result = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(result));
  }
  static void store_fp16(std::uint16_t* to, __m512 value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }

  static __m512 set1(float value) { return _mm512_set1_ps(value); }
  static __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
  static __m512 sub(__m512 a, __m512 b) { return _mm512_sub_ps(a, b); }
  static __m512 mul(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  static __m512 div(__m512 a, __m512 b) { return _mm512_div_ps(a, b); }
  static __m512 sqrt(__m512 a) { return _mm512_sqrt_ps(a); }
  static __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static __m512 first_if_nan(__m512 a, __m512 b, __m512 x) {
    return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), a);
  }
  static unsigned nonfinite(__m512 a) {
    const __m512i exponent = _mm512_set1_epi32(0x7f800000);
    unsigned mask = static_cast<unsigned>(_mm512_cmpeq_epi32_mask(
        _mm512_and_epi32(_mm512_castps_si512(a), exponent), exponent));
    unsigned count = 0;
    for (; mask != 0; mask &= mask - 1) ++count;
    return count;
  }

  static void prefetch(const void* at) {
    _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0);
  }

  // Integer lanes: unsigned 32 bits unless said otherwise.
  using Int = __m512i;
  static __m512i bits(__m512 a) { return _mm512_castps_si512(a); }
  static __m512 from_bits(__m512i a) { return _mm512_castsi512_ps(a); }
  static __m512i set1i(std::uint32_t a) { return _mm512_set1_epi32(static_cast<int>(a)); }
  static __m512i iota() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
  static __m512i addi(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
  static __m512i subi(__m512i a, __m512i b) { return _mm512_sub_epi32(a, b); }
  static __m512i muli(__m512i a, __m512i b) { return _mm512_mullo_epi32(a, b); }
  static __m512i andi(__m512i a, __m512i b) { return _mm512_and_epi32(a, b); }
  static __m512i ori(__m512i a, __m512i b) { return _mm512_or_epi32(a, b); }
  static __m512i xori(__m512i a, __m512i b) { return _mm512_xor_epi32(a, b); }
  template <int kBits>
  static __m512i shl(__m512i a) { return _mm512_slli_epi32(a, kBits); }
  template <int kBits>
  static __m512i shr(__m512i a) { return _mm512_srli_epi32(a, kBits); }
  static __mmask16 greater(__m512i a, __m512i b) { return _mm512_cmpgt_epi32_mask(a, b); }
  static __mmask16 equal(__m512i a, __m512i b) { return _mm512_cmpeq_epi32_mask(a, b); }
  static __m512i select(__mmask16 where, __m512i a, __m512i b) {
    return _mm512_mask_mov_epi32(b, where, a);
  }
  static __m512i keep(__mmask16 where, __m512i a) { return _mm512_maskz_mov_epi32(where, a); }
  static __m512i maxi(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }
  static __m512i mini(__m512i a, __m512i b) { return _mm512_min_epi32(a, b); }
  static __m512 to_float(__m512i a) { return _mm512_cvtepi32_ps(a); }
  static __m512i truncate(__m512 a) { return _mm512_cvttps_epi32(a); }
  static __m512i load_u8(const std::uint8_t* from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void store_u8(std::uint8_t* to, __m512i a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(a));
  }
  static void store_u16(std::uint16_t* to, __m512i a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(a));
  }
  static void store_u32(std::uint32_t* to, __m512i a) { _mm512_storeu_si512(to, a); }
  static __m512i load_u32(const std::uint32_t* from) { return _mm512_loadu_si512(from); }

  struct Squares {
    __m512d lanes[2];
    explicit Squares(const double* from) {
      for (int i = 0; i < 2; ++i) lanes[i] = _mm512_loadu_pd(from + 8 * i);
    }
    static __m512d plus_square(__m512d sum, __m256 values) {
      const __m512d wide = _mm512_cvtps_pd(values);
      return _mm512_add_pd(sum, _mm512_mul_pd(wide, wide));
    }
    void add(const __m512* group) {
      const __m256 low = _mm512_castps512_ps256(group[0]);
      const __m256 high = _mm256_castpd_ps(
          _mm512_extractf64x4_pd(_mm512_castps_pd(group[0]), 1));
      lanes[0] = plus_square(lanes[0], low);
      lanes[1] = plus_square(lanes[1], high);
    }
    void store(double* to) const {
      for (int i = 0; i < 2; ++i) _mm512_storeu_pd(to + 8 * i, lanes[i]);
    }
  };
};
