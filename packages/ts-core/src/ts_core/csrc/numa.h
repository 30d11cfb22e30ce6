// Loops over memory that may lie on several NUMA nodes.
#pragma once

#include <cstddef>
#include <functional>

namespace ts {

// As parallel_for, but on a machine with several memory nodes a thread first takes chunks whose
// memory (`address_of(chunk)`) is on the node it runs on, then those left over. Where the system
// does not tell, and on machines with one node, it is parallel_for.
void parallel_for_near(std::size_t chunks, int threads,
                       const std::function<const void*(std::size_t)>& address_of,
                       const std::function<void(std::size_t)>& body);

// For tests: acts as if there were `nodes` nodes, memory taking turns in pieces of 64 KiB and
// threads in order of arrival; 0 ends that. Counts chunks run by a thread of their node, and
// elsewhere.
void pretend_nodes(int nodes);
std::size_t pretended_near();
std::size_t pretended_far();

}  // namespace ts
