// AdamW over whole tensors: scalars in double, chunks over the thread pool.
#pragma once

#include <cstddef>

#include "dtype.h"
#include "moments.h"

namespace ts {

struct AdamWOptions {
  double lr, beta1, beta2, eps, weight_decay;
  long long step;      // 1 for the first update
  double grad_scale;   // multiplies the gradient in fp32
};

struct AdamWTensors {
  void* param;
  DType param_dtype;
  const void* grad;
  DType grad_dtype;
  StoredMoment exp_avg;
  StoredMoment exp_avg_sq;
  float* master;  // or nullptr
  std::size_t count;
};

// Where the random bits that round moments come from.
struct Rounding {
  std::uint64_t seed;
  std::uint64_t block;  // the tensors' first element is the first of this block
};

// Throws std::invalid_argument for values outside AdamW's domain.
void check_options(const AdamWOptions& options);

// Elements (with 8-bit moments, blocks) are independent and random bits depend on the place of an
// element alone, so the result does not depend on `threads` or on the chunking.
void adamw_step(const AdamWTensors& tensors, const AdamWOptions& options, const Rounding& rounding,
                int threads);

}  // namespace ts
