#include "grad_stats.h"

#include <algorithm>
#include <vector>

#include "cores.h"
#include "dispatch.h"
#include "thread_pool.h"

namespace ts {
namespace {

constexpr std::size_t kChunkElements = 1 << 16;

}  // namespace

GradStats grad_stats(const void* grad, DType dtype, std::size_t count, int threads) {
  const std::size_t chunks = (count + kChunkElements - 1) / kChunkElements;
  const std::size_t bytes = element_bytes(dtype);
  const GradStatsKernel kernel = kernels().grad_stats[static_cast<int>(dtype)];
  std::vector<GradStats> parts(chunks);
  parallel_for(chunks, effective_threads(threads), [&](std::size_t chunk) {
    const DefaultFloatMode float_mode;
    const std::size_t first = chunk * kChunkElements;
    GradSums sums{};
    kernel(static_cast<const char*>(grad) + first * bytes, std::min(kChunkElements, count - first),
           sums);
    for (int half = kSquareLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) sums.squares[lane] += sums.squares[lane + half];
    }
    parts[chunk] = {sums.squares[0], sums.nonfinite};
  });
  GradStats total{0.0, 0};
  for (const GradStats& part : parts) {
    total.sum_of_squares += part.sum_of_squares;
    total.nonfinite += part.nonfinite;
  }
  return total;
}

}  // namespace ts
