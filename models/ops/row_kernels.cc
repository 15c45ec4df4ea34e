#include "models/ops/row_kernels.h"

#include <cmath>
#include <cstring>

#include "base/clones.h"

namespace dlo {
namespace {

// Partial sums per row: enough independent chains to fill wide registers, in an order that does not
// depend on the instruction set.
constexpr int kLanes = 32;

DLO_INLINE float Load(float value) { return value; }
DLO_INLINE float Load(BFloat16Bits value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

DLO_INLINE void Store(float value, float* to) { *to = value; }
// Rounds to nearest even; a NaN stays one.
DLO_INLINE void Store(float value, BFloat16Bits* to) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

// sum over i of term(i).
template <typename Term>
DLO_INLINE float Sum(int64_t n, Term term) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  float sum = 0;
  for (; i < n; ++i) sum += term(i);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return sum + lanes[0];
}

template <typename T>
DLO_INLINE void LayerNorm(const T* x, const float* scale, const float* shift, int64_t n, float eps,
                          T* y) {
  const float mean =
      Sum(n, [&](int64_t i) __attribute__((always_inline)) { return Load(x[i]); }) / n;
  const float variance = Sum(n,
                             [&](int64_t i) __attribute__((always_inline)) {
                               const float d = Load(x[i]) - mean;
                               return d * d;
                             }) /
                         n;
  const float inverse = 1.0f / std::sqrt(variance + eps);
  for (int64_t i = 0; i < n; ++i) Store((Load(x[i]) - mean) * inverse * scale[i] + shift[i], y + i);
}

template <typename T>
DLO_INLINE void GatedAdd(const T* x, const T* y, const float* gate, int64_t n, T* out) {
  for (int64_t i = 0; i < n; ++i) Store(Load(x[i]) + Load(y[i]) * gate[i], out + i);
}

template <typename T>
DLO_INLINE void RmsNorm(const T* x, const T* weight, int64_t n, float eps, T* y) {
  const float mean_square = Sum(n,
                                [&](int64_t i) __attribute__((always_inline)) {
                                  const float v = Load(x[i]);
                                  return v * v;
                                }) /
                            n;
  const float inverse = 1.0f / std::sqrt(mean_square + eps);
  for (int64_t i = 0; i < n; ++i) Store(Load(x[i]) * inverse * Load(weight[i]), y + i);
}

template <typename T>
DLO_INLINE void Rotate(T* y, const float* cos, const float* sin, int64_t n, int64_t head_dim) {
  for (T* head = y; head < y + n; head += head_dim) {
    for (int64_t i = 0; i < head_dim / 2; ++i) {
      const float a = Load(head[2 * i]);
      const float b = Load(head[2 * i + 1]);
      Store(a * cos[i] - b * sin[i], head + 2 * i);
      Store(a * sin[i] + b * cos[i], head + 2 * i + 1);
    }
  }
}

}  // namespace

DLO_CLONES void LayerNormRow(const float* x, const float* scale, const float* shift, int64_t n,
                             float eps, float* y) {
  LayerNorm(x, scale, shift, n, eps, y);
}
DLO_CLONES void LayerNormRow(const BFloat16Bits* x, const float* scale, const float* shift,
                             int64_t n, float eps, BFloat16Bits* y) {
  LayerNorm(x, scale, shift, n, eps, y);
}
DLO_CLONES void GatedAddRow(const float* x, const float* y, const float* gate, int64_t n,
                            float* out) {
  GatedAdd(x, y, gate, n, out);
}
DLO_CLONES void GatedAddRow(const BFloat16Bits* x, const BFloat16Bits* y, const float* gate,
                            int64_t n, BFloat16Bits* out) {
  GatedAdd(x, y, gate, n, out);
}
DLO_CLONES void RmsNormRow(const float* x, const float* weight, int64_t n, float eps, float* y) {
  RmsNorm(x, weight, n, eps, y);
}
DLO_CLONES void RmsNormRow(const BFloat16Bits* x, const BFloat16Bits* weight, int64_t n, float eps,
                           BFloat16Bits* y) {
  RmsNorm(x, weight, n, eps, y);
}
DLO_CLONES void RotateRow(float* y, const float* cos, const float* sin, int64_t n,
                          int64_t head_dim) {
  Rotate(y, cos, sin, n, head_dim);
}
DLO_CLONES void RotateRow(BFloat16Bits* y, const float* cos, const float* sin, int64_t n,
                          int64_t head_dim) {
  Rotate(y, cos, sin, n, head_dim);
}

}  // namespace dlo
