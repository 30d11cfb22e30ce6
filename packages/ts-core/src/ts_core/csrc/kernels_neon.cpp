// Level "neon" of the inner loops.
#include "kernels_common.h"

#if defined(__aarch64__) || defined(_M_ARM64)
#include <arm_neon.h>

namespace ts {
namespace {
#include "convert.h"
#include "simd_scalar.h"
#include "simd_neon.h"
#include "moments_impl.h"
#include "int8_impl.h"
#include "adamw_impl.h"
#include "kernels_impl.h"
}  // namespace

const KernelTable* neon_kernels() {
  static const KernelTable table = make_table<Neon>();
  return &table;
}

}  // namespace ts
#else
namespace ts {
const KernelTable* neon_kernels() { return nullptr; }
}  // namespace ts
#endif
