#include "models/wan/vae_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>

// Levels of the x86-64 ABI, not processor names: names would match one vendor only.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DLO_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DLO_CLONES
#endif
#define DLO_INLINE inline __attribute__((always_inline))

namespace dlo {
namespace {

// e^x for x in [-87, 88]: x = n ln 2 + r with |r| <= ln 2 / 2, e^x = 2^n e^r, e^r by its Taylor
// polynomial of degree 7 (its error is below a float's rounding). Plain arithmetic, so that loops
// around it vectorise.
DLO_INLINE float Exp(float x) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693145751953125f;  // 16 bits, so n * kLn2High is exact
  constexpr float kLn2Low = 1.42860677e-6f;
  constexpr float kRound =
      12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const float shifted = x * kLog2E + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t exponent = (std::bit_cast<int32_t>(shifted) << 23) + (127 << 23);
  return p * std::bit_cast<float>(exponent);
}

DLO_INLINE float Silu(float v) { return v / (1.0f + Exp(std::min(std::max(-v, -87.0f), 87.0f))); }

DLO_INLINE float SumOfSquares(const float* x, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return sum;
}

}  // namespace

DLO_CLONES void NormRows(const float* x, const float* gain, int64_t rows, int64_t channels,
                         bool silu, float* y) {
  for (int64_t row = 0; row < rows; ++row, x += channels, y += channels) {
    const float inverse = 1.0f / std::max(std::sqrt(SumOfSquares(x, channels)), 1e-12f);
    if (silu) {
#pragma omp simd
      for (int64_t i = 0; i < channels; ++i) y[i] = Silu(x[i] * inverse * gain[i]);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < channels; ++i) y[i] = x[i] * inverse * gain[i];
    }
  }
}

}  // namespace dlo
