// Level "avx2" of the inner loops.
#include "kernels_common.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>

namespace ts {
namespace {
#include "convert.h"
#include "simd_scalar.h"
#include "simd_avx2.h"
#include "moments_impl.h"
#include "int8_impl.h"
#include "adamw_impl.h"
#include "kernels_impl.h"
}  // namespace

const KernelTable* avx2_kernels() {
  static const KernelTable table = make_table<Avx2>();
  return &table;
}

}  // namespace ts
#else
namespace ts {
const KernelTable* avx2_kernels() { return nullptr; }
}  // namespace ts
#endif
