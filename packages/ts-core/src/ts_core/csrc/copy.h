// Host memory copies shared out over the thread pool.
#pragma once

#include <cstddef>

namespace ts {

// Copies `bytes` between ranges that do not overlap. Large copies bypass the cache where the
// processor can, since their bytes will have left it before anyone reads them.
void copy_bytes(void* to, const void* from, std::size_t bytes, int threads);

// Writes one byte in every page of zeroed memory, so that its page faults happen now and on
// several threads.
void touch_pages(void* address, std::size_t bytes, int threads);

}  // namespace ts
