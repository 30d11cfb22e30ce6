// Which SIMD level runs, chosen from what the processor and the operating system support.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace ts {

// Names of the levels this machine can run, best first; "scalar" is always among them.
std::vector<std::string> available_simd_levels();

std::string simd_level();
// Throws std::invalid_argument when this machine cannot run `level`.
void set_simd_level(const std::string& level);

const KernelTable& kernels();

// While it lives, this thread rounds to nearest and keeps subnormal numbers, whatever the thread
// was set to, so that results do not depend on which thread ran a chunk.
class DefaultFloatMode {
 public:
  DefaultFloatMode();
  ~DefaultFloatMode();
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  unsigned long long saved_;
};

}  // namespace ts
