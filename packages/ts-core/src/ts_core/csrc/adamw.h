// AdamW over whole tensors: scalars in double, chunks over the thread pool.
#pragma once

#include <cstddef>

#include "dtype.h"

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
  float* exp_avg;
  float* exp_avg_sq;
  float* master;  // or nullptr
  std::size_t count;
};

// Throws std::invalid_argument for values outside AdamW's domain.
void check_options(const AdamWOptions& options);

// Elements are independent, so the result does not depend on `threads` or on the chunking.
void adamw_step(const AdamWTensors& tensors, const AdamWOptions& options, int threads);

}  // namespace ts
