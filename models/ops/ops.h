// The operations of diffusion transformers that libtorch does not offer in one pass.
//
// On the CPU each runs as one kernel over memory (linear layers through oneDNN, which here beats
// the BLAS behind at::linear); elsewhere as a few ATen calls with the same rounding. "b" below is
// the run dtype (bfloat16 or float32); statistics and modulation are float32. Functions are free of
// state and safe to call from any thread. They throw c10::Error for mismatched shapes.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace dlo {

enum class Activation { kNone, kGeluTanh };

// activation(x w^T + bias): x [..., in] b, w [out, in] b, bias [out] b -> [..., out] b.
at::Tensor Linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                  Activation activation = Activation::kNone);

// A linear layer. With a scale its weight is float8_e4m3fn and stands for itself times the scale.
struct LinearWeights {
  at::Tensor weight;  // [out, in] b or float8_e4m3fn
  at::Tensor scale;   // [1] float32; undefined for a weight in b
  at::Tensor bias;    // [out] b
};

// The same with such weights. On the CPU a scaled weight is brought back to b in `scratch`, which
// is made large enough as needed and serves one layer after the other; elsewhere the layer is
// ScaledLinear.
at::Tensor Linear(const at::Tensor& x, const LinearWeights& w, at::Tensor& scratch,
                  Activation activation = Activation::kNone);

// The rows of a tensor as float8_e4m3fn, each over a scale of its own that maps its largest
// magnitude to 448.
struct QuantizedRows {
  at::Tensor values;  // [rows, channels] float8_e4m3fn
  at::Tensor scales;  // [rows, 1] float32
};
QuantizedRows QuantizeRows(const at::Tensor& x);  // [..., channels]

// The same for a scaled weight, multiplied in float8_e4m3fn with x in QuantizedRows. CUDA only; b
// is bfloat16, and in and out are multiples of 16.
at::Tensor ScaledLinear(const at::Tensor& x, const LinearWeights& w,
                        Activation activation = Activation::kNone);

// LayerNorm without parameters over the last dimension, then scale and shift, rounded once:
// x [G, L, D] b, scale and shift [R, D] float32 with R = 1 or L -> [G, L, D] b.
at::Tensor ScaledLayerNorm(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& shift,
                           double eps);

// x + y * gate in float32, rounded once: x [X, L, D] b, y [G, L, D] b, gate [R, D] float32 with X =
// 1 or G, R = 1 or L -> [G, L, D] b.
at::Tensor GatedAdd(const at::Tensor& x, const at::Tensor& y, const at::Tensor& gate);

// The angles of a rotary embedding: [L, head_dim / 2] float32 each.
struct Rotary {
  at::Tensor cos;
  at::Tensor sin;
};

// RMSNorm over all heads together (x [G, L, D] b, weight [D] b), then, given `rotary`, the rotation
// of adjacent pairs of each head of `head_dim` channels -> [G, L, D] b. The normalised value is
// rounded before the rotation, as in diffusers.
at::Tensor RmsNormRotary(const at::Tensor& x, const at::Tensor& weight, double eps,
                         int64_t head_dim, const std::optional<Rotary>& rotary);

// softmax(q k^T / sqrt(d) + key_bias) v over heads, without storing the scores:
// q [G, Lq, D] b, k and v [G, Lk, D] b, key_bias [Lk] float32 -> [G, Lq, D] b.
at::Tensor Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     int64_t num_heads, const std::optional<at::Tensor>& key_bias = std::nullopt);

}  // namespace dlo
