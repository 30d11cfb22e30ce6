#include "memory_stream.h"

#include <algorithm>
#include <atomic>

#include "cores.h"
#include "dispatch.h"
#include "thread_pool.h"

namespace ts {
namespace {

constexpr std::size_t kLine = 64;

// Where part `index` of `parts` begins: a multiple of a cache line.
std::size_t part_start(std::size_t bytes, std::size_t parts, std::size_t index) {
  if (index >= parts) return bytes;
  return bytes / parts / kLine * kLine * index;
}

}  // namespace

void stream_memory(const std::vector<StreamRegion>& regions, std::size_t parts,
                   std::size_t parts_per_turn, int threads, std::uint8_t flip) {
  static std::atomic<unsigned> sink{0};  // keeps reads from being dropped
  const KernelTable& table = kernels();
  const std::size_t turns = (parts + parts_per_turn - 1) / parts_per_turn;
  parallel_for(turns, effective_threads(threads), [&](std::size_t turn) {
    unsigned seen = 0;
    const std::size_t last = std::min(parts, (turn + 1) * parts_per_turn);
    for (std::size_t part = turn * parts_per_turn; part < last; ++part) {
      for (const StreamRegion& region : regions) {
        const std::size_t first = part_start(region.bytes, parts, part);
        const std::size_t count = part_start(region.bytes, parts, part + 1) - first;
        void* start = static_cast<char*>(region.address) + first;
        if (region.written) {
          table.rewrite(start, count, flip);
        } else {
          seen ^= table.read_through(start, count);
        }
      }
    }
    sink.store(seen, std::memory_order_relaxed);
  });
}

}  // namespace ts
