// Host memory in a few large mappings ("slabs") from which exact blocks are carved.
//
// Mechanism only: where a block goes, when a slab may be page-locked and how large it should be is
// decided by the caller (ts_core.memory.arena).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ts {

class Arena;

// A range of a slab, given back when the object is destroyed. The bytes are not zeroed.
class Block {
 public:
  Block(std::shared_ptr<Arena> arena, std::size_t slab, char* address, std::size_t bytes,
        std::string tag);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  char* address() const { return address_; }
  std::size_t bytes() const { return bytes_; }
  const std::string& tag() const { return tag_; }

 private:
  std::shared_ptr<Arena> arena_;
  std::size_t slab_;
  char* address_;
  std::size_t bytes_;
  std::string tag_;
};

struct SlabRequest {
  std::size_t bytes;         // a multiple of the page size
  bool pin;                  // page-lock it; if the driver refuses, no slab is added
  int device;                // primary context used when the thread has none
  int touch_threads;         // page faults on this many threads before page-locking
  bool release_when_free;    // unmapped as soon as its last block is given back
};

struct ArenaStats {
  std::uint64_t slab_bytes = 0;
  std::uint64_t pinned_bytes = 0;
  std::uint64_t used_bytes = 0;         // carved, after rounding
  std::uint64_t slabs = 0;
  std::uint64_t largest_free = 0;
  std::uint64_t largest_free_pinned = 0;
  std::uint64_t blocks = 0;
  std::uint64_t system_calls = 0;       // mappings made and page-lock calls, ever
  std::map<std::string, std::uint64_t> live_bytes;  // bytes asked for, by tag
};

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  static constexpr std::size_t kAlignment = 64;

  Arena();
  ~Arena();

  // The first free range that fits, in slabs that are page-locked (`pinned`) or in any other slab
  // (not `pinned`); nullptr when there is none.
  std::unique_ptr<Block> carve(std::size_t bytes, bool pinned, const std::string& tag);

  // Adds a slab. Returns an empty string, or why it could not be mapped or page-locked.
  std::string add_slab(const SlabRequest& request);

  // Page-locks the slabs that are not, live blocks included, while the locked total stays within
  // `cap` bytes. Returns an empty string or the reason of the first refusal.
  std::string pin_slabs(std::uint64_t cap, int device);

  // Unmaps slabs with no block in them; returns the bytes given back.
  std::uint64_t trim();

  ArenaStats stats() const;

 private:
  friend class Block;
  struct Slab {
    char* base = nullptr;
    std::size_t bytes = 0;
    bool pinned = false;
    bool release_when_free = false;
    int device = 0;
    std::size_t used = 0;
    std::map<std::size_t, std::size_t> free;  // offset -> bytes, no two adjacent
  };

  void give_back(std::size_t slab, char* address, std::size_t bytes, const std::string& tag);
  void unmap(Slab& slab);  // holds mutex_
  static std::size_t rounded(std::size_t bytes);

  mutable std::mutex mutex_;
  std::map<std::size_t, Slab> slabs_;  // by the order they were added
  std::size_t next_slab_ = 0;
  std::uint64_t system_calls_ = 0;
  std::map<std::string, std::uint64_t> live_bytes_;
  std::uint64_t blocks_ = 0;
  long owner_process_;
};

}  // namespace ts
