#include "arena.h"

#include <algorithm>
#include <utility>

#include "copy.h"
#include "driver.h"
#include "platform.h"

namespace ts {
namespace {

constexpr std::size_t kHugePage = 2 << 20;

}  // namespace

Block::Block(std::shared_ptr<Arena> arena, std::size_t slab, char* address, std::size_t bytes,
             std::string tag)
    : arena_(std::move(arena)),
      slab_(slab),
      address_(address),
      bytes_(bytes),
      tag_(std::move(tag)) {}

Block::~Block() { arena_->give_back(slab_, address_, bytes_, tag_); }

Arena::Arena() : owner_process_(platform::process_id()) {}

Arena::~Arena() {
  // Every Block holds a reference, so no block is left. A child of fork() leaves the parent's
  // page-locks alone.
  if (platform::process_id() != owner_process_) return;
  for (auto& entry : slabs_) unmap(entry.second);
}

std::size_t Arena::rounded(std::size_t bytes) {
  return (std::max<std::size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
}

std::unique_ptr<Block> Arena::carve(std::size_t bytes, bool pinned, const std::string& tag) {
  const std::size_t wanted = rounded(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& entry : slabs_) {
    Slab& slab = entry.second;
    if (slab.pinned != pinned || slab.bytes - slab.used < wanted) continue;
    for (auto range = slab.free.begin(); range != slab.free.end(); ++range) {
      if (range->second < wanted) continue;
      const std::size_t offset = range->first;
      const std::size_t left = range->second - wanted;
      slab.free.erase(range);
      if (left > 0) slab.free[offset + wanted] = left;
      slab.used += wanted;
      live_bytes_[tag] += bytes;
      ++blocks_;
      return std::make_unique<Block>(shared_from_this(), entry.first, slab.base + offset, bytes,
                                     tag);
    }
  }
  return nullptr;
}

void Arena::give_back(std::size_t index, char* address, std::size_t bytes, const std::string& tag) {
  // In a child of fork() the mutex may have been held by a thread that does not exist here.
  if (platform::process_id() != owner_process_) return;
  const std::size_t size = rounded(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto live = live_bytes_.find(tag);
  live->second -= bytes;
  --blocks_;
  const auto entry = slabs_.find(index);
  Slab& slab = entry->second;
  slab.used -= size;
  std::size_t offset = static_cast<std::size_t>(address - slab.base);
  std::size_t length = size;
  auto after = slab.free.lower_bound(offset);
  if (after != slab.free.end() && after->first == offset + length) {
    length += after->second;
    after = slab.free.erase(after);
  }
  if (after != slab.free.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      length += before->second;
      slab.free.erase(before);
    }
  }
  slab.free[offset] = length;
  if (slab.release_when_free && slab.used == 0) {
    unmap(slab);
    slabs_.erase(entry);
  }
}

std::string Arena::add_slab(const SlabRequest& request) {
  Slab slab;
  std::string why;
  const std::size_t alignment = request.bytes >= kHugePage ? kHugePage : platform::page_bytes();
  slab.base = static_cast<char*>(platform::map_memory(request.bytes, alignment, why));
  if (slab.base == nullptr) return why;
  slab.bytes = request.bytes;
  slab.device = request.device;
  slab.release_when_free = request.release_when_free;
  slab.free[0] = request.bytes;
  platform::advise_huge_pages(slab.base, slab.bytes);
  std::uint64_t calls = 1;
  if (request.pin) {
    touch_pages(slab.base, slab.bytes, request.touch_threads);
    why = driver::register_memory(slab.base, slab.bytes, request.device);
    ++calls;
    slab.pinned = why.empty();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  system_calls_ += calls;
  if (request.pin && !slab.pinned) {
    platform::unmap_memory(slab.base, slab.bytes);
    return why;
  }
  slabs_[next_slab_++] = std::move(slab);
  return std::string();
}

std::string Arena::pin_slabs(std::uint64_t cap, int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::uint64_t pinned = 0;
  for (const auto& entry : slabs_) {
    if (entry.second.pinned) pinned += entry.second.bytes;
  }
  std::string first_refusal;
  for (auto& entry : slabs_) {
    Slab& slab = entry.second;
    if (slab.pinned || pinned + slab.bytes > cap) continue;
    ++system_calls_;
    const std::string why = driver::register_memory(slab.base, slab.bytes, device);
    if (why.empty()) {
      slab.pinned = true;
      slab.device = device;
      pinned += slab.bytes;
    } else if (first_refusal.empty()) {
      first_refusal = why;
    }
  }
  return first_refusal;
}

std::uint64_t Arena::trim() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::uint64_t freed = 0;
  for (auto entry = slabs_.begin(); entry != slabs_.end();) {
    if (entry->second.used == 0) {
      freed += entry->second.bytes;
      unmap(entry->second);
      entry = slabs_.erase(entry);
    } else {
      ++entry;
    }
  }
  return freed;
}

void Arena::unmap(Slab& slab) {
  // At exit the driver may be gone already and refuses; the mapping goes in any case.
  if (slab.pinned) driver::unregister_memory(slab.base, slab.device);
  platform::unmap_memory(slab.base, slab.bytes);
}

ArenaStats Arena::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  ArenaStats stats;
  for (const auto& entry : slabs_) {
    const Slab& slab = entry.second;
    stats.slab_bytes += slab.bytes;
    if (slab.pinned) stats.pinned_bytes += slab.bytes;
    stats.used_bytes += slab.used;
    ++stats.slabs;
    for (const auto& range : slab.free) {
      stats.largest_free = std::max<std::uint64_t>(stats.largest_free, range.second);
      if (slab.pinned) {
        stats.largest_free_pinned =
            std::max<std::uint64_t>(stats.largest_free_pinned, range.second);
      }
    }
  }
  stats.blocks = blocks_;
  stats.system_calls = system_calls_;
  for (const auto& entry : live_bytes_) {
    if (entry.second > 0) stats.live_bytes.insert(entry);
  }
  return stats;
}

}  // namespace ts
