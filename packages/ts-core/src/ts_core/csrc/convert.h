// Scalar conversions between fp32 and the 16-bit formats, bit for bit as the SIMD levels do them:
// round to nearest, ties to even; a bf16 NaN becomes 0x7fc0 as in torch, an fp16 NaN keeps its sign
// and leading payload bits and is made quiet as the hardware does.
//
// Included inside each kernels_*.cpp file's anonymous namespace (see kernels.h for the reason).

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Any address will do: tensors may be views that are not even aligned to their elements.
template <typename T>
inline T read(const T* from) {
  T value;
  memcpy(&value, from, sizeof(T));
  return value;
}

template <typename T>
inline void write(T* to, T value) {
  memcpy(to, &value, sizeof(T));
}

inline float bf16_to_float(std::uint16_t value) {
  return float_of(static_cast<std::uint32_t>(value) << 16);
}

inline std::uint16_t float_to_bf16(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float fp16_to_float(std::uint16_t value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value & 0x8000u) << 16;
  const std::uint32_t exponent = (value >> 10) & 0x1fu;
  const std::uint32_t fraction = value & 0x3ffu;
  if (exponent == 0x1f) {  // infinity, or a NaN made quiet
    return float_of(sign | 0x7f800000u | (fraction << 13) | (fraction != 0 ? 0x00400000u : 0u));
  }
  if (exponent == 0) {  // zero and subnormals: fraction * 2^-24, exact
    const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return float_of(sign | bits_of(magnitude));
  }
  return float_of(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

inline std::uint16_t float_to_fp16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {  // NaN
    return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    return static_cast<std::uint16_t>(sign | 0x7c00u);
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: subnormal
    // Adding 0.5 aligns the value so that its last kept bit is 2^-24; the addition rounds.
    const std::uint32_t rounded = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    return static_cast<std::uint16_t>(sign | rounded);
  }
  const std::uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}
