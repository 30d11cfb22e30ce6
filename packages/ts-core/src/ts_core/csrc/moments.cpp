#include "moments.h"

#include <algorithm>
#include <cstring>

#include "cores.h"
#include "dispatch.h"
#include "thread_pool.h"

namespace ts {
namespace {

constexpr std::size_t kChunkBlocks = 256;
constexpr std::size_t kChunkElements = kChunkBlocks * kMomentBlock;

std::uint64_t mixed(std::uint64_t x) {  // SplitMix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

const MomentKernels& kernels_of(const StoredMoment& moment) {
  return kernels().moments[static_cast<int>(moment.type)];
}

}  // namespace

std::uint64_t random_key(std::uint64_t seed, std::uint64_t step) {
  return mixed(seed ^ mixed(step));
}

StoredMoment advanced(const StoredMoment& moment, std::size_t block) {
  StoredMoment part = moment;
  part.values =
      static_cast<char*>(moment.values) + block * kMomentBlock * moment_bytes(moment.type);
  if (moment.scales != nullptr) part.scales = moment.scales + block;
  return part;
}

void decode(const StoredMoment& moment, float* to, std::size_t count) {
  if (moment.type == MomentType::float32) {
    std::memcpy(to, moment.values, count * sizeof(float));
    return;
  }
  kernels_of(moment).decode[static_cast<int>(moment.which)](moment.values, moment.scales, to,
                                                            count);
}

void encode(const float* from, const StoredMoment& moment, std::size_t count, std::uint64_t key,
            std::uint64_t block) {
  if (moment.type == MomentType::float32) {
    std::memcpy(moment.values, from, count * sizeof(float));
    return;
  }
  kernels_of(moment).encode[static_cast<int>(moment.which)](from, moment.values, moment.scales,
                                                            count, key, block);
}

void moments_to_float32(const StoredMoment& moment, float* to, std::size_t count, int threads) {
  const std::size_t chunks = (count + kChunkElements - 1) / kChunkElements;
  parallel_for(chunks, effective_threads(threads), [&](std::size_t chunk) {
    const DefaultFloatMode float_mode;
    const std::size_t first = chunk * kChunkElements;
    decode(advanced(moment, chunk * kChunkBlocks), to + first,
           std::min(kChunkElements, count - first));
  });
}

void moments_from_float32(const float* from, const StoredMoment& moment, std::size_t count,
                          std::uint64_t key, std::uint64_t block, int threads) {
  const std::size_t chunks = (count + kChunkElements - 1) / kChunkElements;
  parallel_for(chunks, effective_threads(threads), [&](std::size_t chunk) {
    const DefaultFloatMode float_mode;
    const std::size_t first = chunk * kChunkElements;
    encode(from + first, advanced(moment, chunk * kChunkBlocks),
           std::min(kChunkElements, count - first), key, block + chunk * kChunkBlocks);
  });
}

}  // namespace ts
