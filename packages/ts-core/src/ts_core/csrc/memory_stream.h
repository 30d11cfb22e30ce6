// A plain stream through memory, as a measure of what an update could at most reach.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ts {

struct StreamRegion {
  void* address;
  std::size_t bytes;
  bool written;  // read, changed and written back; else only read
};

// Goes through all regions once, each cut into `parts` equal parts, `parts_per_turn` of them in one
// turn of the loop over the thread pool: part i of every region, one after the other, then part
// i + 1. Small parts (1 KiB) are fastest, since the processor then loads several streams ahead. A
// written byte is exclusive-ored with `flip`: 0 leaves memory as it was.
void stream_memory(const std::vector<StreamRegion>& regions, std::size_t parts,
                   std::size_t parts_per_turn, int threads, std::uint8_t flip);

}  // namespace ts
