#include "copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cores.h"
#include "platform.h"
#include "thread_pool.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <emmintrin.h>
#define TS_STREAMING_STORES 1
#endif

namespace ts {
namespace {

constexpr std::size_t kChunkBytes = 1 << 20;
constexpr std::size_t kStreamFrom = 16 << 20;  // below this the destination may stay in cache

#if defined(TS_STREAMING_STORES)

void copy_streaming(char* to, const char* from, std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(to) % kLine;
  if (misaligned != 0) {
    const std::size_t head = std::min(kLine - misaligned, bytes);
    std::memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
  }
  for (; bytes >= kLine; bytes -= kLine, to += kLine, from += kLine) {
    const __m128i* source = reinterpret_cast<const __m128i*>(from);
    __m128i* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to, from, bytes);
  _mm_sfence();  // streaming stores are not ordered with what follows otherwise
}

#else

void copy_streaming(char* to, const char* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

#endif

}  // namespace

void copy_bytes(void* to, const void* from, std::size_t bytes, int threads) {
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  const bool streaming = bytes >= kStreamFrom;
  const std::size_t chunks = (bytes + kChunkBytes - 1) / kChunkBytes;
  parallel_for(chunks, effective_threads(threads), [&](std::size_t chunk) {
    const std::size_t first = chunk * kChunkBytes;
    const std::size_t count = std::min(kChunkBytes, bytes - first);
    if (streaming) {
      copy_streaming(target + first, source + first, count);
    } else {
      std::memcpy(target + first, source + first, count);
    }
  });
}

void touch_pages(void* address, std::size_t bytes, int threads) {
  constexpr std::size_t kTouchChunk = 4 << 20;  // two huge pages
  const std::size_t page = platform::page_bytes();
  const std::size_t chunks = (bytes + kTouchChunk - 1) / kTouchChunk;
  parallel_for(chunks, effective_threads(threads), [&](std::size_t chunk) {
    volatile char* byte = static_cast<volatile char*>(address) + chunk * kTouchChunk;
    const std::size_t count = std::min(kTouchChunk, bytes - chunk * kTouchChunk);
    for (std::size_t offset = 0; offset < count; offset += page) byte[offset] = 0;
  });
}

}  // namespace ts
