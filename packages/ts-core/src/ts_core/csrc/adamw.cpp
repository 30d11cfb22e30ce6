#include "adamw.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>

#include "cores.h"
#include "dispatch.h"
#include "numa.h"

namespace ts {
namespace {

// A chunk is the work of a thread at a time: the large one keeps its overhead small, the small one
// is worth waking a thread for.
constexpr std::size_t kLargestChunk = 1 << 16;
constexpr std::size_t kSmallestChunk = 1 << 14;

// Elements per chunk: about four chunks per thread, in whole blocks.
std::size_t chunk_elements(std::size_t count, int threads) {
  const std::size_t wanted = count / (4 * static_cast<std::size_t>(threads));
  const std::size_t whole = (wanted + kMomentBlock - 1) / kMomentBlock * kMomentBlock;
  return std::clamp(whole, kSmallestChunk, kLargestChunk);
}

void require(bool holds, const char* name, double value, const char* expected) {
  if (holds) return;
  std::ostringstream message;
  message << name << "=" << value << ": expected " << expected;
  throw std::invalid_argument(message.str());
}

AdamWScalars scalars(const AdamWOptions& options) {
  const double step = static_cast<double>(options.step);
  const double correction1 = 1.0 - std::pow(options.beta1, step);
  const double correction2 = 1.0 - std::pow(options.beta2, step);
  const double weight = 1.0 - options.beta1;
  AdamWScalars s;
  s.decay = static_cast<float>(1.0 - options.lr * options.weight_decay);
  s.grad_scale = static_cast<float>(options.grad_scale);
  s.lerp_from_m = weight < 0.5;
  s.lerp_factor = static_cast<float>(weight) - (s.lerp_from_m ? 0.0f : 1.0f);
  s.beta2 = static_cast<float>(options.beta2);
  s.one_minus_beta2 = static_cast<float>(1.0 - options.beta2);
  s.correction2 = static_cast<float>(std::sqrt(correction2));
  s.correction2_inverse = static_cast<float>(1.0 / static_cast<double>(s.correction2));
  s.eps = static_cast<float>(options.eps);
  s.step_size = static_cast<float>(options.lr / correction1);
  return s;
}

// `count` elements from `first` on, which begins a block.
AdamWRange range_of(const AdamWTensors& t, std::size_t first, std::size_t count) {
  const std::size_t block = first / kMomentBlock;
  const StoredMoment exp_avg = advanced(t.exp_avg, block);
  const StoredMoment exp_avg_sq = advanced(t.exp_avg_sq, block);
  return {static_cast<char*>(t.param) + first * element_bytes(t.param_dtype),
          static_cast<const char*>(t.grad) + first * element_bytes(t.grad_dtype),
          exp_avg.values,
          exp_avg_sq.values,
          exp_avg.scales,
          exp_avg_sq.scales,
          t.master != nullptr ? t.master + first : nullptr,
          count,
          0,
          block};
}

}  // namespace

void check_options(const AdamWOptions& o) {
  require(std::isfinite(o.lr) && o.lr >= 0, "lr", o.lr, "a finite number >= 0");
  require(o.beta1 >= 0 && o.beta1 < 1, "beta1", o.beta1, "a number in [0, 1)");
  require(o.beta2 >= 0 && o.beta2 < 1, "beta2", o.beta2, "a number in [0, 1)");
  require(std::isfinite(o.eps) && o.eps >= 0, "eps", o.eps, "a finite number >= 0");
  require(std::isfinite(o.weight_decay) && o.weight_decay >= 0, "weight_decay", o.weight_decay,
          "a finite number >= 0");
  require(o.step >= 1, "step", static_cast<double>(o.step), "1 for the first update, then 2, ...");
  // NaN is torch's clipping factor for gradients that hold NaN; everything becomes NaN, as there.
  require(!std::isinf(o.grad_scale), "grad_scale", o.grad_scale, "a finite number or NaN");
}

void adamw_step(const AdamWTensors& t, const AdamWOptions& options, const Rounding& rounding,
                int threads) {
  if (t.count == 0) return;
  const AdamWScalars s = scalars(options);
  const AdamWKernel kernel = kernels().adamw[static_cast<int>(t.exp_avg.type) + 1]
                                            [static_cast<int>(t.param_dtype)]
                                            [static_cast<int>(t.grad_dtype)]
                                            [t.master != nullptr ? 1 : 0];
  const std::uint64_t key = random_key(rounding.seed, static_cast<std::uint64_t>(options.step));
  const int used_threads = effective_threads(threads);
  const std::size_t step = chunk_elements(t.count, used_threads);
  const std::size_t chunks = (t.count + step - 1) / step;
  const auto address_of = [&](std::size_t chunk) -> const void* {
    return static_cast<const char*>(t.exp_avg_sq.values) +
           chunk * step * moment_bytes(t.exp_avg_sq.type);
  };
  parallel_for_near(chunks, used_threads, address_of, [&](std::size_t chunk) {
    const DefaultFloatMode float_mode;
    const std::size_t first = chunk * step;
    const std::size_t count = std::min(step, t.count - first);
    AdamWRange range = range_of(t, first, count);
    range.key = key;
    range.block += rounding.block;
    kernel(s, range);
  });
}

}  // namespace ts
