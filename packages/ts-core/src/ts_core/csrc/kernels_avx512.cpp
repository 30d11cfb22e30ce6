// Level "avx512" of the inner loops.
#include "kernels_common.h"

#if defined(__x86_64__) || defined(_M_X64)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own header initializes its "undefined" registers with themselves.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

namespace ts {
namespace {
#include "convert.h"
#include "simd_scalar.h"
#include "simd_avx512.h"
#include "moments_impl.h"
#include "int8_impl.h"
#include "adamw_impl.h"
#include "kernels_impl.h"
}  // namespace

const KernelTable* avx512_kernels() {
  static const KernelTable table = make_table<Avx512>();
  return &table;
}

}  // namespace ts
#else
namespace ts {
const KernelTable* avx512_kernels() { return nullptr; }
}  // namespace ts
#endif
