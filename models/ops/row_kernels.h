// One-row CPU kernels behind ops.h. Torch-free, compiled for several instruction sets and chosen at
// load time.
//
// T is float or BFloat16Bits (the upper half of a float32). Rows need no alignment. No function
// allocates.
#pragma once

#include <cstdint>

namespace dlo {

struct BFloat16Bits {
  uint16_t bits;
};

// y = (x - mean) / sqrt(var + eps) * scale + shift over n channels, with the population variance.
void LayerNormRow(const float* x, const float* scale, const float* shift, int64_t n, float eps,
                  float* y);
void LayerNormRow(const BFloat16Bits* x, const float* scale, const float* shift, int64_t n,
                  float eps, BFloat16Bits* y);

// out = x + y * gate.
void GatedAddRow(const float* x, const float* y, const float* gate, int64_t n, float* out);
void GatedAddRow(const BFloat16Bits* x, const BFloat16Bits* y, const float* gate, int64_t n,
                 BFloat16Bits* out);

// y = x / sqrt(mean(x^2) + eps) * weight.
void RmsNormRow(const float* x, const float* weight, int64_t n, float eps, float* y);
void RmsNormRow(const BFloat16Bits* x, const BFloat16Bits* weight, int64_t n, float eps,
                BFloat16Bits* y);

// Rotates the pairs (y[2i], y[2i+1]) of each head in place; cos and sin hold head_dim / 2 values,
// shared by the n / head_dim heads.
void RotateRow(float* y, const float* cos, const float* sin, int64_t n, int64_t head_dim);
void RotateRow(BFloat16Bits* y, const float* cos, const float* sin, int64_t n, int64_t head_dim);

}  // namespace dlo
