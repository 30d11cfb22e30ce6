#include "adamw.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>

#include "cores.h"
#include "dispatch.h"
#include "thread_pool.h"

namespace ts {
namespace {

constexpr std::size_t kChunkElements = 1 << 16;

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

}  // namespace

void check_options(const AdamWOptions& o) {
  require(std::isfinite(o.lr) && o.lr >= 0, "lr", o.lr, "a finite number >= 0");
  require(o.beta1 >= 0 && o.beta1 < 1, "beta1", o.beta1, "a number in [0, 1)");
  require(o.beta2 >= 0 && o.beta2 < 1, "beta2", o.beta2, "a number in [0, 1)");
  require(std::isfinite(o.eps) && o.eps >= 0, "eps", o.eps, "a finite number >= 0");
  require(std::isfinite(o.weight_decay) && o.weight_decay >= 0, "weight_decay", o.weight_decay,
          "a finite number >= 0");
  require(o.step >= 1, "step", static_cast<double>(o.step), "1 for the first update, then 2, ...");
  require(std::isfinite(o.grad_scale), "grad_scale", o.grad_scale, "a finite number");
}

void adamw_step(const AdamWTensors& t, const AdamWOptions& options, int threads) {
  if (t.count == 0) return;
  const AdamWScalars s = scalars(options);
  const AdamWKernel kernel = kernels().adamw[static_cast<int>(t.param_dtype)]
                                            [static_cast<int>(t.grad_dtype)]
                                            [t.master != nullptr ? 1 : 0];
  const std::size_t param_bytes = element_bytes(t.param_dtype);
  const std::size_t grad_bytes = element_bytes(t.grad_dtype);
  const std::size_t chunks = (t.count + kChunkElements - 1) / kChunkElements;
  parallel_for(chunks, effective_threads(threads), [&](std::size_t chunk) {
    const DefaultFloatMode float_mode;
    const std::size_t first = chunk * kChunkElements;
    const AdamWRange range{static_cast<char*>(t.param) + first * param_bytes,
                           static_cast<const char*>(t.grad) + first * grad_bytes,
                           t.exp_avg + first,
                           t.exp_avg_sq + first,
                           t.master != nullptr ? t.master + first : nullptr,
                           std::min(kChunkElements, t.count - first)};
    kernel(s, range);
  });
}

}  // namespace ts
