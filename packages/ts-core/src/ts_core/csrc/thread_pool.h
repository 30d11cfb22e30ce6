// A persistent pool of threads that share out the chunks of a loop.
//
// The caller works on its own loop too, so a loop finishes even when every worker is busy, and
// several callers may run loops at once. Idle workers sleep on a condition variable. After fork()
// the child starts with no pool and makes a new one on first use.
#pragma once

#include <cstddef>
#include <functional>

namespace ts {

// Calls body(0) .. body(chunks - 1), each exactly once, in no particular order, on at most
// `threads` threads (the caller is one of them), and returns when all are done. `body` must not
// throw and must not call parallel_for.
void parallel_for(std::size_t chunks, int threads, const std::function<void(std::size_t)>& body);

// Threads the pool holds now (0 before its first use).
int pool_threads();

// Makes children of fork() start without a pool; called once, when the module is loaded.
void forget_pool_in_children();

// Ends the pool's threads; later loops run on their callers alone.
void shutdown_pool();

}  // namespace ts
