// Level "scalar" of the inner loops: for machines with none of the others, and the reference that
// the others are compared with, bit for bit.
#include "kernels_common.h"

namespace ts {
namespace {
#include "convert.h"
#include "simd_scalar.h"
#include "moments_impl.h"
#include "int8_impl.h"
#include "adamw_impl.h"
#include "kernels_impl.h"
}  // namespace

const KernelTable* scalar_kernels() {
  static const KernelTable table = make_table<Scalar>();
  return &table;
}

}  // namespace ts
