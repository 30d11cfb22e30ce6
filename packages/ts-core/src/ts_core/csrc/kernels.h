// The inner loops that exist once per SIMD level, behind tables of plain function pointers.
//
// Every level runs the same arithmetic in the same order: one fp32 rounding per operation, a fused
// multiply-add exactly where one is written (never by the compiler's choice), and sums of squares
// in 16 fp64 lanes where element i goes to lane i % 16. So all levels give the same bits.
//
// The kernels_*.cpp files are compiled with instructions that the machine may lack. They include
// no header with inline functions of external linkage (no C++ standard library), because the linker
// keeps one copy of such a function for the whole module and could keep theirs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ts {

struct AdamWScalars {
  float decay;            // 1 - lr * weight_decay
  float grad_scale;       // multiplies the gradient
  // m <- lerp(m, g, w) with w = 1 - beta1, from the nearer end: m + w (g - m) when w < 0.5, else
  // g + (w - 1)(g - m).
  float lerp_factor;
  bool lerp_from_m;
  float beta2;
  float one_minus_beta2;  // 1 - beta2
  float correction2;          // sqrt(1 - beta2^step)
  float correction2_inverse;  // 1 / correction2, of the fp32 value
  float eps;
  float step_size;        // lr / (1 - beta1^step)
};

struct AdamWRange {
  void* param;         // param_dtype
  const void* grad;    // grad_dtype
  void* exp_avg;       // of the moments' type, as are its squares
  void* exp_avg_sq;
  float* exp_avg_scales;     // 8 bits only: one a block
  float* exp_avg_sq_scales;
  float* master;       // fp32, or null
  std::size_t count;
  // Of moments that are not fp32: the first element is the first of a block, and these pick the
  // random bits.
  std::uint64_t key;
  std::uint64_t block;
};

using AdamWKernel = void (*)(const AdamWScalars&, const AdamWRange&);

// Values per scale of 8-bit moments, and the unit of the random bits' counter for all moments.
constexpr int kMomentBlock = 256;
// Least exponents of the 8-bit scales (see int8_impl.h).
constexpr int kExpAvgLeastExponent = -116;
constexpr int kExpAvgSqLeastExponent = -56;

// Both start at the first element of a block. `key` and `block` pick the random bits.
using DecodeMoments = void (*)(const void* stored, const float* scales, float* to,
                               std::size_t count);
using EncodeMoments = void (*)(const float* from, void* stored, float* scales, std::size_t count,
                               std::uint64_t key, std::uint64_t block);
struct MomentKernels {  // [0] exp_avg, [1] exp_avg_sq
  DecodeMoments decode[2];
  EncodeMoments encode[2];
};

constexpr int kSquareLanes = 16;
struct GradSums {
  double squares[kSquareLanes];
  std::uint64_t nonfinite;
};
// Adds the elements to `sums`; the element at `grad` goes to lane 0.
using GradStatsKernel = void (*)(const void* grad, std::size_t count, GradSums& sums);

// Memory streams (memory_stream.h): write every byte back, changed by `flip`; read every byte.
using RewriteKernel = void (*)(void* bytes, std::size_t count, std::uint8_t flip);
using ReadKernel = std::uint32_t (*)(const void* bytes, std::size_t count);

struct KernelTable {
  // [fp32, bf16 or 8-bit moments][param dtype][grad dtype][has master]
  AdamWKernel adamw[3][3][3][2];
  GradStatsKernel grad_stats[3];
  MomentKernels moments[2];  // bfloat16, int8
  RewriteKernel rewrite;
  ReadKernel read_through;
};

const KernelTable* scalar_kernels();
// These return nullptr where the target has no such instructions.
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();
const KernelTable* neon_kernels();

}  // namespace ts
