// Compares one level's kernels with the scalar ones, bit for bit, on numbers of many magnitudes and
// on random bit patterns: for levels that a machine lacks, under an emulator, and for sanitizers.
// (Python tests compare the levels that it has.)
//
//   c=src/ts_core/csrc; f="-std=c++17 -O2 -ffp-contract=off -fno-math-errno -I$c"
//   aarch64-linux-gnu-g++ $f -static -DTS_LEVEL=neon_kernels tests/native/compare_level.cpp \
//       $c/kernels_neon.cpp $c/kernels_scalar.cpp -o compare_level
//   qemu-aarch64-static ./compare_level
//   g++ $f -mavx2 -mfma -mf16c -fsanitize=address,undefined -DTS_LEVEL=avx2_kernels \
//       tests/native/compare_level.cpp $c/kernels_avx2.cpp $c/kernels_scalar.cpp -o compare_level
//
// (clang does as well for Arm: `zig c++ -target aarch64-linux-musl`.)
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.h"

using namespace ts;

namespace {

std::mt19937 generator(7);
long compared = 0;
long different = 0;

template <typename T>
std::vector<T> random_bits(std::size_t count) {
  std::vector<T> values(count);
  for (T& value : values) {
    const std::uint32_t bits = generator();
    std::memcpy(&value, &bits, sizeof(T));
  }
  return values;
}

std::vector<float> numbers(std::size_t count, bool raw, bool positive = false) {
  std::vector<float> values = random_bits<float>(count);
  std::normal_distribution<float> normal;
  for (float& value : values) {
    if (!raw) value = normal(generator) * std::ldexp(1.0f, static_cast<int>(generator() % 34) - 30);
    if (positive) value = std::fabs(value);
  }
  return values;
}

bool both_nan(float a, float b) { return a != a && b != b; }

void count(const char* what, bool same) {
  ++compared;
  if (!same) {
    ++different;
    std::printf("%s differ\n", what);
  }
}

void compare(const char* what, const std::vector<float>& a, const std::vector<float>& b) {
  bool same = true;
  for (std::size_t i = 0; i < a.size(); ++i) {
    same = same && (std::memcmp(&a[i], &b[i], 4) == 0 || both_nan(a[i], b[i]));
  }
  count(what, same);
}

void compare(const char* what, const std::vector<std::uint8_t>& a,
             const std::vector<std::uint8_t>& b) {
  count(what, a == b);
}

// 16-bit numbers; `infinity` is that of their format.
void compare(const char* what, const std::vector<std::uint16_t>& a,
             const std::vector<std::uint16_t>& b, unsigned infinity) {
  bool same = true;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const bool nan = (a[i] & 0x7fffu) > infinity && (b[i] & 0x7fffu) > infinity;
    same = same && (a[i] == b[i] || nan);
  }
  count(what, same);
}

AdamWScalars scalars(bool from_m) {
  const float correction = 0.0447f;
  return {0.9999f,    0.37f,             from_m ? 0.1f : -0.3f, from_m, 0.999f, 0.001f,
          correction, 1.0f / correction, 1e-8f,                 1e-2f};
}

// Moment 0 (exp_avg) or 1 in fp32, bf16 or 8 bits (0, 1, 2), which needs no more room than fp32.
std::vector<std::uint8_t> stored(const KernelTable& table, int moments, int which,
                                 const std::vector<float>& from, std::vector<float>& scales) {
  std::vector<std::uint8_t> to(4 * from.size());
  scales.resize((from.size() + kMomentBlock - 1) / kMomentBlock);
  if (moments == 0) {
    std::memcpy(to.data(), from.data(), to.size());
  } else {
    table.moments[moments - 1].encode[which](from.data(), to.data(), scales.data(), from.size(), 7,
                                             11);
  }
  return to;
}

std::vector<float> floats(const std::vector<std::uint8_t>& bytes) {
  std::vector<float> values(bytes.size() / 4);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

void compare_updates(const KernelTable& level, const KernelTable& scalar, std::size_t n, bool raw) {
  for (int variant = 0; variant < 108; ++variant) {
    const int p = variant % 3;
    const int g = variant / 3 % 3;
    const bool master = variant / 9 % 2 != 0;
    const int moments = variant / 18 % 3;
    const AdamWScalars s = scalars(variant / 54 != 0);
    const std::uint64_t key = 91 * static_cast<std::uint64_t>(variant) + 3;
    std::vector<float> param[2], wide[2], scales[2], scales_sq[2];
    std::vector<std::uint8_t> avg[2], sq[2];
    std::vector<std::uint16_t> half[2];
    std::vector<float> grad = numbers(n, raw);
    std::vector<std::uint16_t> half_grad = random_bits<std::uint16_t>(n);
    param[0] = param[1] = numbers(n, raw);
    half[0] = half[1] = random_bits<std::uint16_t>(n);
    avg[0] = avg[1] = stored(scalar, moments, 0, numbers(n, raw), scales[0]);
    sq[0] = sq[1] = stored(scalar, moments, 1, numbers(n, raw, true), scales_sq[0]);
    scales[1] = scales[0];
    scales_sq[1] = scales_sq[0];
    wide[0] = wide[1] = numbers(n, raw);
    for (int side = 0; side < 2; ++side) {
      void* parameters = p == 0 ? static_cast<void*>(param[side].data()) : half[side].data();
      const void* gradients = g == 0 ? static_cast<const void*>(grad.data()) : half_grad.data();
      float* masters = master ? wide[side].data() : nullptr;
      const KernelTable& table = side == 0 ? level : scalar;
      table.adamw[moments][p][g][master](
          s, {parameters, gradients, avg[side].data(), sq[side].data(), scales[side].data(),
              scales_sq[side].data(), masters, n, key, key / 3});
    }
    compare("parameters", param[0], param[1]);
    compare("16-bit parameters", half[0], half[1], p == 1 ? 0x7f80 : 0x7c00);
    if (moments == 0) {  // a NaN's payload is not compared
      compare("exp_avg", floats(avg[0]), floats(avg[1]));
      compare("exp_avg_sq", floats(sq[0]), floats(sq[1]));
    } else {
      compare("exp_avg", avg[0], avg[1]);
      compare("exp_avg_sq", sq[0], sq[1]);
    }
    compare("scales", scales[0], scales[1]);
    compare("scales", scales_sq[0], scales_sq[1]);
    compare("master", wide[0], wide[1]);
  }
}

void compare_moments(const KernelTable& level, const KernelTable& scalar, std::size_t n, bool raw) {
  for (int variant = 0; variant < 100; ++variant) {
    const int type = variant % 2;
    const int which = variant / 2 % 2;
    const std::uint64_t key = 77 * static_cast<std::uint64_t>(variant) + 5;
    const std::vector<float> from = numbers(n, raw, which == 1);
    std::vector<std::uint8_t> codes[2];
    std::vector<float> scales[2], decoded[2];
    for (int side = 0; side < 2; ++side) {
      const MomentKernels& kernels = (side == 0 ? level : scalar).moments[type];
      codes[side].resize(2 * n);
      scales[side].resize((n + kMomentBlock - 1) / kMomentBlock);
      decoded[side].resize(n);
      kernels.encode[which](from.data(), codes[side].data(), scales[side].data(), n, key, key / 3);
      kernels.decode[which](codes[side].data(), scales[side].data(), decoded[side].data(), n);
    }
    compare("codes", codes[0], codes[1]);
    compare("scales", scales[0], scales[1]);
    compare("decoded moments", decoded[0], decoded[1]);
  }
}

void compare_rest(const KernelTable& level, const KernelTable& scalar, std::size_t n, bool raw) {
  for (int dtype = 0; dtype < 3; ++dtype) {
    const std::vector<float> grad = numbers(n, raw);
    const std::size_t elements = dtype == 0 ? n : 2 * n;
    GradSums a{};
    GradSums b{};
    level.grad_stats[dtype](grad.data(), elements, a);
    scalar.grad_stats[dtype](grad.data(), elements, b);
    count("counts of non-finite elements", a.nonfinite == b.nonfinite);
    bool same = true;
    for (int lane = 0; lane < kSquareLanes; ++lane) {  // a NaN's sign is not compared
      const bool nan = a.squares[lane] != a.squares[lane] && b.squares[lane] != b.squares[lane];
      same = same && (nan || std::memcmp(&a.squares[lane], &b.squares[lane], sizeof(double)) == 0);
    }
    count("sums of squares", same);
  }
  std::vector<std::uint8_t> bytes[2];
  bytes[0] = bytes[1] = random_bits<std::uint8_t>(n);
  level.rewrite(bytes[0].data(), n, 0x5a);
  scalar.rewrite(bytes[1].data(), n, 0x5a);
  compare("rewritten bytes", bytes[0], bytes[1]);
}

}  // namespace

int main() {
  const KernelTable* level = TS_LEVEL();
  if (level == nullptr) {
    std::puts("this program was compiled for another processor than the level's");
    return 2;
  }
  for (const bool raw : {false, true}) {
    for (const std::size_t n : {1, 3, 4, 5, 15, 16, 17, 255, 256, 257, 511, 1024, 1031}) {
      compare_updates(*level, *scalar_kernels(), n, raw);
      compare_moments(*level, *scalar_kernels(), n, raw);
      compare_rest(*level, *scalar_kernels(), n, raw);
    }
  }
  std::printf("%ld comparisons, %ld differ\n", compared, different);
  return different != 0 ? 1 : 0;
}
