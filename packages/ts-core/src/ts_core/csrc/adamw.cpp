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
// Moments that are not fp32 pass through fp32 buffers of this many elements, which stay in the
// first-level cache.
constexpr std::size_t kStageElements = 4 * kMomentBlock;

// Elements per chunk: about four chunks per thread, in whole stages.
std::size_t chunk_elements(std::size_t count, int threads) {
  const std::size_t wanted = count / (4 * static_cast<std::size_t>(threads));
  const std::size_t whole = (wanted + kStageElements - 1) / kStageElements * kStageElements;
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

AdamWRange range_of(const AdamWTensors& t, std::size_t first, std::size_t count, float* exp_avg,
                    float* exp_avg_sq) {
  return {static_cast<char*>(t.param) + first * element_bytes(t.param_dtype),
          static_cast<const char*>(t.grad) + first * element_bytes(t.grad_dtype),
          exp_avg,
          exp_avg_sq,
          t.master != nullptr ? t.master + first : nullptr,
          count};
}

// The same update with moments that are expanded before and rounded after it: the parameter sees
// the new moments in fp32.
void update_staged(AdamWKernel kernel, const AdamWScalars& s, const AdamWTensors& t,
                   std::size_t first, std::size_t count, std::uint64_t key,
                   std::uint64_t first_block) {
  alignas(64) float exp_avg[kStageElements];
  alignas(64) float exp_avg_sq[kStageElements];
  for (std::size_t done = 0; done < count; done += kStageElements) {
    const std::size_t at = first + done;
    const std::size_t now = std::min(kStageElements, count - done);
    const std::size_t block = at / kMomentBlock;
    const StoredMoment m = advanced(t.exp_avg, block);
    const StoredMoment v = advanced(t.exp_avg_sq, block);
    decode(m, exp_avg, now);
    decode(v, exp_avg_sq, now);
    kernel(s, range_of(t, at, now, exp_avg, exp_avg_sq));
    encode(exp_avg, m, now, key, first_block + block);
    if (stores_roots(v.type)) {
      encode_roots(exp_avg_sq, v, now, key, first_block + block);
    } else {
      encode(exp_avg_sq, v, now, key, first_block + block);
    }
  }
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
  const AdamWKernel kernel = kernels().adamw[static_cast<int>(t.param_dtype)]
                                            [static_cast<int>(t.grad_dtype)]
                                            [t.master != nullptr ? 1 : 0]
                                            [stores_roots(t.exp_avg_sq.type) ? 1 : 0];
  const std::uint64_t key = random_key(rounding.seed, static_cast<std::uint64_t>(options.step));
  const bool staged = t.exp_avg.type != MomentType::float32;
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
    if (staged) {
      update_staged(kernel, s, t, first, count, key, rounding.block);
    } else {
      kernel(s, range_of(t, first, count, static_cast<float*>(t.exp_avg.values) + first,
                         static_cast<float*>(t.exp_avg_sq.values) + first));
    }
  });
}

}  // namespace ts
