// How many cores this process may keep busy: its affinity mask and its cgroup's CPU quota.
#pragma once

#include <string>

namespace ts {

// The tightest CPU quota of the process's cgroup and its ancestors (v1 or v2) in cores, 0 when
// there is none. `root` is prefixed to every path read; tests point it at a made-up tree.
double cgroup_cpu_quota(const std::string& root);

// Cores the calling thread may use: min(affinity, quota rounded up), at least 1.
int usable_cores();

// Makes usable_cores() return `cores`; 0 asks the system again. For tests.
void override_usable_cores(int cores);

// Threads for a job: `requested`, or all usable cores for 0; never more than the usable cores.
int effective_threads(int requested);

}  // namespace ts
