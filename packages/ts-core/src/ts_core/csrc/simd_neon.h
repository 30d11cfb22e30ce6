// Four lanes: NEON of 64-bit Arm. Run under emulation only (tests/native/compare_neon.cpp).
//
// Included inside kernels_neon.cpp's anonymous namespace (see kernels.h for the reason).

struct Neon {
  using Register = float32x4_t;
  static constexpr int kWidth = 4;

  static float32x4_t load32(const float* from) { return vld1q_f32(from); }
  static float32x4_t load_bf16(const std::uint16_t* from) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from), 16));
  }
  static float32x4_t load_fp16(const std::uint16_t* from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
  }
  static void store32(float* to, float32x4_t value) { vst1q_f32(to, value); }
  static void store_bf16(std::uint16_t* to, float32x4_t value) {
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded =
        vshrq_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), 16);
    const uint32x4_t is_number = vceqq_f32(value, value);
    vst1_u16(to, vmovn_u32(vbslq_u32(is_number, rounded, vdupq_n_u32(0x7fc0))));
  }
  static void store_fp16(std::uint16_t* to, float32x4_t value) {
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(value)));
  }

  static float32x4_t set1(float value) { return vdupq_n_f32(value); }
  static float32x4_t add(float32x4_t a, float32x4_t b) { return vaddq_f32(a, b); }
  static float32x4_t sub(float32x4_t a, float32x4_t b) { return vsubq_f32(a, b); }
  static float32x4_t mul(float32x4_t a, float32x4_t b) { return vmulq_f32(a, b); }
  static float32x4_t div(float32x4_t a, float32x4_t b) { return vdivq_f32(a, b); }
  static float32x4_t sqrt(float32x4_t a) { return vsqrtq_f32(a); }
  static float32x4_t fma(float32x4_t a, float32x4_t b, float32x4_t c) {
    return vfmaq_f32(c, a, b);
  }
  static float32x4_t first_if_nan(float32x4_t a, float32x4_t b, float32x4_t x) {
    return vbslq_f32(vceqq_f32(x, x), b, a);
  }
  static unsigned nonfinite(float32x4_t a) {
    const uint32x4_t exponent = vdupq_n_u32(0x7f800000);
    const uint32x4_t same = vceqq_u32(vandq_u32(vreinterpretq_u32_f32(a), exponent), exponent);
    return vaddvq_u32(vshrq_n_u32(same, 31));
  }

  static void prefetch(const void* at) {
#if defined(__GNUC__) || defined(__clang__)
    __builtin_prefetch(at);
#else
    __prefetch(at);
#endif
  }

  // Integer lanes: unsigned 32 bits unless said otherwise.
  using Int = uint32x4_t;
  static uint32x4_t bits(float32x4_t a) { return vreinterpretq_u32_f32(a); }
  static float32x4_t from_bits(uint32x4_t a) { return vreinterpretq_f32_u32(a); }
  static uint32x4_t set1i(std::uint32_t a) { return vdupq_n_u32(a); }
  static uint32x4_t iota() {
    const std::uint32_t lanes[4] = {0, 1, 2, 3};
    return vld1q_u32(lanes);
  }
  static uint32x4_t addi(uint32x4_t a, uint32x4_t b) { return vaddq_u32(a, b); }
  static uint32x4_t subi(uint32x4_t a, uint32x4_t b) { return vsubq_u32(a, b); }
  static uint32x4_t muli(uint32x4_t a, uint32x4_t b) { return vmulq_u32(a, b); }
  static uint32x4_t andi(uint32x4_t a, uint32x4_t b) { return vandq_u32(a, b); }
  static uint32x4_t ori(uint32x4_t a, uint32x4_t b) { return vorrq_u32(a, b); }
  static uint32x4_t xori(uint32x4_t a, uint32x4_t b) { return veorq_u32(a, b); }
  template <int kBits>
  static uint32x4_t shl(uint32x4_t a) { return vshlq_n_u32(a, kBits); }
  template <int kBits>
  static uint32x4_t shr(uint32x4_t a) { return vshrq_n_u32(a, kBits); }
  static int32x4_t s(uint32x4_t a) { return vreinterpretq_s32_u32(a); }
  static uint32x4_t greater(uint32x4_t a, uint32x4_t b) { return vcgtq_s32(s(a), s(b)); }
  static uint32x4_t equal(uint32x4_t a, uint32x4_t b) { return vceqq_u32(a, b); }
  static uint32x4_t select(uint32x4_t where, uint32x4_t a, uint32x4_t b) {
    return vbslq_u32(where, a, b);
  }
  static uint32x4_t keep(uint32x4_t where, uint32x4_t a) { return vandq_u32(where, a); }
  static uint32x4_t maxi(uint32x4_t a, uint32x4_t b) {
    return vreinterpretq_u32_s32(vmaxq_s32(s(a), s(b)));
  }
  static uint32x4_t mini(uint32x4_t a, uint32x4_t b) {
    return vreinterpretq_u32_s32(vminq_s32(s(a), s(b)));
  }
  static float32x4_t to_float(uint32x4_t a) { return vcvtq_f32_s32(s(a)); }
  static uint32x4_t truncate(float32x4_t a) { return vreinterpretq_u32_s32(vcvtq_s32_f32(a)); }
  static uint32x4_t load_u8(const std::uint8_t* from) {
    std::uint32_t four;
    memcpy(&four, from, 4);
    const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
    return vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
  }
  static void store_u8(std::uint8_t* to, uint32x4_t a) {
    const uint16x4_t words = vmovn_u32(a);
    const uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
    const std::uint32_t four = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
    memcpy(to, &four, 4);
  }
  static void store_u16(std::uint16_t* to, uint32x4_t a) { vst1_u16(to, vmovn_u32(a)); }
  static void store_u32(std::uint32_t* to, uint32x4_t a) { vst1q_u32(to, a); }
  static uint32x4_t load_u32(const std::uint32_t* from) { return vld1q_u32(from); }

  struct Squares {
    float64x2_t lanes[8];
    explicit Squares(const double* from) {
      for (int i = 0; i < 8; ++i) lanes[i] = vld1q_f64(from + 2 * i);
    }
    static float64x2_t plus_square(float64x2_t sum, float64x2_t wide) {
      return vaddq_f64(sum, vmulq_f64(wide, wide));
    }
    void add(const float32x4_t* group) {
      for (int i = 0; i < 4; ++i) {
        lanes[2 * i] = plus_square(lanes[2 * i], vcvt_f64_f32(vget_low_f32(group[i])));
        lanes[2 * i + 1] = plus_square(lanes[2 * i + 1], vcvt_high_f64_f32(group[i]));
      }
    }
    void store(double* to) const {
      for (int i = 0; i < 8; ++i) vst1q_f64(to + 2 * i, lanes[i]);
    }
  };
};
