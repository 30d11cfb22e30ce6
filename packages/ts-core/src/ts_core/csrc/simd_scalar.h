// One lane: the tails of every level, and the whole of level "scalar".
//
// Included inside each kernels_*.cpp file's anonymous namespace (see kernels.h for the reason).

struct Scalar {
  using Register = float;
  static constexpr int kWidth = 1;

  static float load32(const float* from) { return read(from); }
  static float load_bf16(const std::uint16_t* from) { return bf16_to_float(read(from)); }
  static float load_fp16(const std::uint16_t* from) { return fp16_to_float(read(from)); }
  static void store32(float* to, float value) { write(to, value); }
  static void store_bf16(std::uint16_t* to, float value) { write(to, float_to_bf16(value)); }
  static void store_fp16(std::uint16_t* to, float value) { write(to, float_to_fp16(value)); }

  static float set1(float value) { return value; }
  static float add(float a, float b) { return a + b; }
  static float sub(float a, float b) { return a - b; }
  static float mul(float a, float b) { return a * b; }
  static float div(float a, float b) { return a / b; }
  static float sqrt(float a) { return TS_SQRTF(a); }
  static float fma(float a, float b, float c) { return TS_FMAF(a, b, c); }
  static float first_if_nan(float a, float b, float x) { return x != x ? a : b; }
  static unsigned nonfinite(float a) { return (bits_of(a) & 0x7f800000u) == 0x7f800000u; }

  static void prefetch(const void*) {}  // (arithmetic takes longer than memory)

  // Integer lanes: unsigned 32 bits; greater, maxi, mini and to_float take them as signed.
  using Int = std::uint32_t;
  static std::uint32_t bits(float a) { return bits_of(a); }
  static float from_bits(std::uint32_t a) { return float_of(a); }
  static std::uint32_t set1i(std::uint32_t a) { return a; }
  static std::uint32_t iota() { return 0; }
  static std::uint32_t addi(std::uint32_t a, std::uint32_t b) { return a + b; }
  static std::uint32_t subi(std::uint32_t a, std::uint32_t b) { return a - b; }
  static std::uint32_t muli(std::uint32_t a, std::uint32_t b) { return a * b; }
  static std::uint32_t andi(std::uint32_t a, std::uint32_t b) { return a & b; }
  static std::uint32_t ori(std::uint32_t a, std::uint32_t b) { return a | b; }
  static std::uint32_t xori(std::uint32_t a, std::uint32_t b) { return a ^ b; }
  template <int kBits>
  static std::uint32_t shl(std::uint32_t a) { return a << kBits; }
  template <int kBits>
  static std::uint32_t shr(std::uint32_t a) { return a >> kBits; }
  static std::int32_t s(std::uint32_t a) { return static_cast<std::int32_t>(a); }
  static bool greater(std::uint32_t a, std::uint32_t b) { return s(a) > s(b); }
  static bool equal(std::uint32_t a, std::uint32_t b) { return a == b; }
  static std::uint32_t select(bool where, std::uint32_t a, std::uint32_t b) {
    return where ? a : b;
  }
  static std::uint32_t keep(bool where, std::uint32_t a) { return where ? a : 0; }
  static std::uint32_t maxi(std::uint32_t a, std::uint32_t b) { return s(a) > s(b) ? a : b; }
  static std::uint32_t mini(std::uint32_t a, std::uint32_t b) { return s(a) < s(b) ? a : b; }
  static float to_float(std::uint32_t a) { return static_cast<float>(s(a)); }
  // Out of range the conversion is undefined in C++; the vector levels give numbers never used.
  static std::uint32_t truncate(float a) {
    const bool fits = a > -2147483648.0f && a < 2147483648.0f;
    return fits ? static_cast<std::uint32_t>(static_cast<std::int32_t>(a)) : 0;
  }
  static std::uint32_t load_u8(const std::uint8_t* from) { return *from; }
  static void store_u8(std::uint8_t* to, std::uint32_t a) { *to = static_cast<std::uint8_t>(a); }
  static void store_u16(std::uint16_t* to, std::uint32_t a) {
    write(to, static_cast<std::uint16_t>(a));
  }
  static void store_u32(std::uint32_t* to, std::uint32_t a) { write(to, a); }
  static std::uint32_t load_u32(const std::uint32_t* from) { return read(from); }

  struct Squares {
    double lanes[kSquareLanes];
    explicit Squares(const double* from) {
      for (int i = 0; i < kSquareLanes; ++i) lanes[i] = from[i];
    }
    void add(const float* group) {
      for (int i = 0; i < kSquareLanes; ++i) {
        lanes[i] += static_cast<double>(group[i]) * static_cast<double>(group[i]);
      }
    }
    void store(double* to) const {
      for (int i = 0; i < kSquareLanes; ++i) to[i] = lanes[i];
    }
  };
};
