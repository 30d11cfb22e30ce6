// Adam's moments in fp32, bf16 or 8 bits: their types, sizes and conversion from and to fp32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace ts {

enum class MomentType : int { float32 = -1, bfloat16 = 0, int8 = 1 };  // indexes KernelTable
enum class Moment : int { exp_avg = 0, exp_avg_sq = 1 };

inline MomentType parse_moments(const std::string& name) {
  if (name == "float32") return MomentType::float32;
  if (name == "bfloat16") return MomentType::bfloat16;
  if (name == "int8") return MomentType::int8;
  throw std::invalid_argument("moments='" + name +
                              "' is not one of 'float32', 'bfloat16', 'int8'");
}

inline std::size_t moment_bytes(MomentType type) {
  return type == MomentType::float32 ? 4 : type == MomentType::bfloat16 ? 2 : 1;
}

inline std::size_t moment_blocks(std::size_t count) {
  return (count + kMomentBlock - 1) / kMomentBlock;
}

// Bytes of the scales of `count` values; none but for 8 bits.
inline std::size_t scale_bytes(MomentType type, std::size_t count) {
  return type == MomentType::int8 ? moment_blocks(count) * sizeof(float) : 0;
}

// The key of the random bits of one update. Bits depend on it and on the element's place alone.
std::uint64_t random_key(std::uint64_t seed, std::uint64_t step);

// One moment of a tensor: `values` (and `scales` for 8 bits) start at the first value of block
// `first_block` of the tensor.
struct StoredMoment {
  MomentType type;
  Moment which;
  void* values;
  float* scales;  // 8 bits only
};

// The part of `moment` that starts `block` blocks further on.
StoredMoment advanced(const StoredMoment& moment, std::size_t block);

// To and from fp32 memory, on the calling thread.
void decode(const StoredMoment& moment, float* to, std::size_t count);
void encode(const float* from, const StoredMoment& moment, std::size_t count, std::uint64_t key,
            std::uint64_t block);

// To and from fp32 memory for whole tensors, on several threads. Storing what was loaded gives the
// same bytes.
void moments_to_float32(const StoredMoment& moment, float* to, std::size_t count, int threads);
void moments_from_float32(const float* from, const StoredMoment& moment, std::size_t count,
                          std::uint64_t key, std::uint64_t block, int threads);

}  // namespace ts
