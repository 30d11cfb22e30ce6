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
