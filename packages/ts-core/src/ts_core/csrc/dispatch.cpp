#include "dispatch.h"

#include <atomic>
#include <cstdint>
#include <stdexcept>

#if defined(__x86_64__) || defined(_M_X64)
#define TS_X86 1
#include <immintrin.h>
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#endif

namespace ts {
namespace {

#if defined(TS_X86)

struct Registers {
  std::uint32_t eax, ebx, ecx, edx;
};

Registers cpuid(std::uint32_t leaf, std::uint32_t subleaf) {
  Registers r{};
#if defined(_MSC_VER)
  int values[4];
  __cpuidex(values, static_cast<int>(leaf), static_cast<int>(subleaf));
  r = {static_cast<std::uint32_t>(values[0]), static_cast<std::uint32_t>(values[1]),
       static_cast<std::uint32_t>(values[2]), static_cast<std::uint32_t>(values[3])};
#else
  __cpuid_count(leaf, subleaf, r.eax, r.ebx, r.ecx, r.edx);
#endif
  return r;
}

// The register sets that the operating system saves on a context switch.
std::uint64_t saved_register_sets() {
#if defined(_MSC_VER)
  return _xgetbv(0);
#else
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
#endif
}

struct Features {
  bool avx2 = false;
  bool avx512 = false;
};

Features detect() {
  Features found;
  if (cpuid(0, 0).eax < 7) return found;
  const Registers basic = cpuid(1, 0);
  const bool has_xgetbv = (basic.ecx & (1u << 27)) != 0;
  const bool has_f16c = (basic.ecx & (1u << 29)) != 0;
  const bool has_fma = (basic.ecx & (1u << 12)) != 0;
  if (!has_xgetbv) return found;
  const std::uint64_t saved = saved_register_sets();
  const Registers extended = cpuid(7, 0);
  const bool ymm_saved = (saved & 0x6) == 0x6;
  const bool zmm_saved = (saved & 0xe6) == 0xe6;
  found.avx2 = ymm_saved && has_f16c && has_fma && (extended.ebx & (1u << 5)) != 0;
  found.avx512 = found.avx2 && zmm_saved && (extended.ebx & (1u << 16)) != 0;
  return found;
}

#endif

struct Level {
  const char* name;
  const KernelTable* table;
};

const std::vector<Level>& levels() {
  static const std::vector<Level> found = [] {
    std::vector<Level> list;
#if defined(TS_X86)
    const Features features = detect();
    if (features.avx512) list.push_back({"avx512", avx512_kernels()});
    if (features.avx2) list.push_back({"avx2", avx2_kernels()});
#endif
    if (neon_kernels() != nullptr) list.push_back({"neon", neon_kernels()});
    list.push_back({"scalar", scalar_kernels()});
    return list;
  }();
  return found;
}

std::atomic<const Level*> chosen{nullptr};

const Level& current() {
  const Level* level = chosen.load(std::memory_order_acquire);
  return level != nullptr ? *level : levels().front();
}

}  // namespace

std::vector<std::string> available_simd_levels() {
  std::vector<std::string> names;
  for (const Level& level : levels()) names.emplace_back(level.name);
  return names;
}

std::string simd_level() { return current().name; }

void set_simd_level(const std::string& name) {
  std::string listed;
  for (const Level& level : levels()) {
    if (name == level.name) {
      chosen.store(&level, std::memory_order_release);
      return;
    }
    listed += (listed.empty() ? "'" : ", '") + std::string(level.name) + "'";
  }
  throw std::invalid_argument("SIMD level '" + name + "' cannot run on this machine; it has " +
                              listed);
}

const KernelTable& kernels() { return *current().table; }

#if defined(TS_X86)
DefaultFloatMode::DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
DefaultFloatMode::~DefaultFloatMode() { _mm_setcsr(static_cast<unsigned>(saved_)); }
#elif defined(__aarch64__) && defined(__GNUC__)
DefaultFloatMode::DefaultFloatMode() : saved_(0) {
  __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
  __asm__ volatile("msr fpcr, %0" : : "r"(0ULL));
}
DefaultFloatMode::~DefaultFloatMode() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
DefaultFloatMode::DefaultFloatMode() : saved_(0) {}
DefaultFloatMode::~DefaultFloatMode() { (void)saved_; }
#endif

}  // namespace ts
