// The sum of squares and the number of infinite or NaN elements of a gradient.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"

namespace ts {

struct GradStats {
  double sum_of_squares;    // fp64; infinite or NaN when an element is
  std::uint64_t nonfinite;  // elements that are infinite or NaN
};

// The order of additions is fixed by `count` alone: the result does not depend on `threads` or on
// the SIMD level.
GradStats grad_stats(const void* grad, DType dtype, std::size_t count, int threads);

}  // namespace ts
