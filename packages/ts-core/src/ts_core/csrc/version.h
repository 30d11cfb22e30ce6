#pragma once

namespace ts {

// "TS_CORE_CSRC=" and the hash of the sources this module was built from. The build script looks
// for the same text in the file, to tell without importing it whether it is up to date.
const char* csrc_marker();

}  // namespace ts
