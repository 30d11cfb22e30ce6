#include "version.h"

#if !defined(TS_CSRC_HASH)
#error "TS_CSRC_HASH is set by ts_core/_build.py"
#endif

namespace ts {

const char* csrc_marker() { return "TS_CORE_CSRC=" TS_CSRC_HASH; }

}  // namespace ts
