// What each kernels_*.cpp file includes before opening its anonymous namespace: C headers and
// plain declarations only (see kernels.h for the reason).
#pragma once

#include <math.h>
#include <string.h>

#include "kernels.h"

#if defined(__GNUC__) || defined(__clang__)
#define TS_SQRTF __builtin_sqrtf
#define TS_FMAF __builtin_fmaf
#else
#define TS_SQRTF sqrtf
#define TS_FMAF fmaf
#endif
