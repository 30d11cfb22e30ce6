// Checks of what Python hands over: raw addresses and sizes. A wrong one is an error in words
// (std::invalid_argument, ValueError in Python), never a crash, as far as values can tell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace ts {

inline std::size_t checked_count(const char* name, long long count, std::size_t element_bytes) {
  if (count < 0) {
    throw std::invalid_argument(std::string(name) + "=" + std::to_string(count) +
                                ": expected a number >= 0");
  }
  if (static_cast<std::uint64_t>(count) > (std::uint64_t{1} << 62) / element_bytes) {
    throw std::invalid_argument(std::string(name) + "=" + std::to_string(count) +
                                ": more than any address space holds");
  }
  return static_cast<std::size_t>(count);
}

inline int checked_threads(long long threads) {
  if (threads < 0 || threads > 1 << 20) {
    throw std::invalid_argument("threads=" + std::to_string(threads) +
                                ": expected 0 (all usable cores) or a number of threads");
  }
  return static_cast<int>(threads);
}

struct Range {
  const char* name;
  std::uint64_t address;
  std::uint64_t bytes;
};

inline void check_range(const Range& range) {
  if (range.bytes == 0) return;
  if (range.address == 0) {
    throw std::invalid_argument(std::string(range.name) + " is a null pointer; " +
                                std::to_string(range.bytes) + " bytes were expected there");
  }
  if (range.address > UINT64_MAX - range.bytes) {
    throw std::invalid_argument(std::string(range.name) + "=" + std::to_string(range.address) +
                                " with " + std::to_string(range.bytes) +
                                " bytes ends beyond the address space");
  }
}

inline void check_apart(const Range& a, const Range& b) {
  if (a.bytes == 0 || b.bytes == 0) return;
  if (a.address < b.address + b.bytes && b.address < a.address + a.bytes) {
    throw std::invalid_argument(std::string(a.name) + " and " + b.name +
                                " overlap; they must be separate memory");
  }
}

// Each range is mapped memory as far as can be told, and no two share a byte.
inline void check_ranges(std::initializer_list<Range> ranges) {
  for (const Range* a = ranges.begin(); a != ranges.end(); ++a) {
    check_range(*a);
    for (const Range* b = ranges.begin(); b != a; ++b) check_apart(*b, *a);
  }
}

template <typename T>
T* pointer(std::uint64_t address) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));
}

}  // namespace ts
