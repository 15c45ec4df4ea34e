#include "models/ops/ops.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <cfloat>

#include "loader/quantize.h"
#include "models/ops/row_kernels.h"

namespace dlo {
namespace {

// Rows a task should hold at least, so that handing it to a thread costs less than it saves.
int64_t RowGrain(int64_t channels) {
  return std::max<int64_t>(1, 8192 / std::max<int64_t>(channels, 1));
}

bool OnCpu(const at::Tensor& x) { return x.device().is_cpu(); }

const BFloat16Bits* Bits(const at::Tensor& x) {
  return reinterpret_cast<const BFloat16Bits*>(x.const_data_ptr<at::BFloat16>());
}
BFloat16Bits* MutableBits(const at::Tensor& x) {
  return reinterpret_cast<BFloat16Bits*>(x.mutable_data_ptr<at::BFloat16>());
}

// Calls f(const T* data of each input..., T* output), with T the row kernels' element type.
template <typename F, typename... Inputs>
void WithElementType(const at::Tensor& output, F f, const Inputs&... inputs) {
  if (output.scalar_type() == at::kBFloat16) {
    f(Bits(inputs)..., MutableBits(output));
  } else {
    f(inputs.template const_data_ptr<float>()..., output.mutable_data_ptr<float>());
  }
}

// The row of a [R, D] parameter that belongs to token `l`.
const float* ParameterRow(const at::Tensor& parameter, int64_t l) {
  return parameter.const_data_ptr<float>() + (parameter.size(0) == 1 ? 0 : l * parameter.size(1));
}

void CheckParameter(const at::Tensor& parameter, const at::Tensor& x) {
  TORCH_CHECK(parameter.dim() == 2 && parameter.scalar_type() == at::kFloat &&
                  parameter.size(1) == x.size(2) &&
                  (parameter.size(0) == 1 || parameter.size(0) == x.size(1)),
              "modulation of shape ", parameter.sizes(), " does not fit tokens of shape ",
              x.sizes());
}

at::Tensor Activate(at::Tensor y, Activation activation) {
  return activation == Activation::kGeluTanh ? at::gelu(y, "tanh") : y;
}

// Values a task should bring back at least, so that handing it to a thread costs less than it
// saves.
constexpr int64_t kDequantizeGrain = 32768;

// The weight in `dtype`, as part of `scratch`.
at::Tensor Dequantize(const LinearWeights& w, at::ScalarType dtype, at::Tensor& scratch) {
  const int64_t n = w.weight.numel();
  TORCH_CHECK(w.weight.scalar_type() == at::kFloat8_e4m3fn && w.weight.is_contiguous() &&
                  w.scale.scalar_type() == at::kFloat && w.scale.numel() == 1 &&
                  (dtype == at::kFloat || dtype == at::kBFloat16),
              "a weight of ", w.weight.scalar_type(), " cannot be scaled to ", dtype);
  if (!scratch.defined() || scratch.scalar_type() != dtype || scratch.numel() < n) {
    scratch = at::Tensor();  // before the new one is made
    scratch = at::empty({n}, w.weight.options().dtype(dtype));
  }
  const auto* from = static_cast<const std::byte*>(w.weight.const_data_ptr());
  auto* to = static_cast<std::byte*>(scratch.mutable_data_ptr());
  const float scale = *w.scale.const_data_ptr<float>();
  const DType run = dtype == at::kFloat ? DType::kF32 : DType::kBF16;
  at::parallel_for(0, n, kDequantizeGrain, [&](int64_t begin, int64_t end) {
    DequantizeE4M3(from + begin, scale, run, to + begin * DTypeBytes(run),
                   static_cast<size_t>(end - begin));
  });
  return scratch.narrow(0, 0, n).view(w.weight.sizes());
}

}  // namespace

at::Tensor Linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                  Activation activation) {
  const bool gelu = activation == Activation::kGeluTanh;
  if (OnCpu(x)) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                               .typed<at::Tensor(const at::Tensor&, const at::Tensor&,
                                                 const std::optional<at::Tensor>&, c10::string_view,
                                                 c10::List<std::optional<at::Scalar>>,
                                                 std::optional<c10::string_view>)>();
    return op.call(x, weight, bias, gelu ? "gelu" : "none", c10::List<std::optional<at::Scalar>>(),
                   gelu ? "tanh" : "");
  }
  return Activate(at::linear(x, weight, bias), activation);
}

at::Tensor Linear(const at::Tensor& x, const LinearWeights& w, at::Tensor& scratch,
                  Activation activation) {
  if (!w.scale.defined()) return Linear(x, w.weight, w.bias, activation);
  if (!OnCpu(x)) return ScaledLinear(x, w, activation);
  return Linear(x, Dequantize(w, x.scalar_type(), scratch), w.bias, activation);
}

QuantizedRows QuantizeRows(const at::Tensor& x) {
  const at::Tensor rows = x.reshape({-1, x.size(-1)}).to(at::kFloat);
  // A row of zeros has a scale, too.
  const at::Tensor scales = (rows.abs().amax(1, /*keepdim=*/true) / kE4M3Max).clamp_min(FLT_MIN);
  return {(rows / scales).clamp(-kE4M3Max, kE4M3Max).to(at::kFloat8_e4m3fn), scales};
}

at::Tensor ScaledLinear(const at::Tensor& x, const LinearWeights& w, Activation activation) {
  const int64_t out = w.weight.size(0);
  const QuantizedRows rows = QuantizeRows(x);
  const at::Tensor y =
      at::_scaled_mm(rows.values, w.weight.t(), rows.scales, w.scale.expand({1, out}).contiguous(),
                     w.bias, /*scale_result=*/{}, x.scalar_type());
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = out;
  return Activate(y.view(shape), activation);
}

at::Tensor ScaledLayerNorm(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& shift,
                           double eps) {
  CheckParameter(scale, x);
  CheckParameter(shift, x);
  if (!OnCpu(x)) {
    at::Tensor normed = at::layer_norm(x.to(at::kFloat), {x.size(2)}, {}, {}, eps);
    return normed.mul_(scale).add_(shift).to(x.scalar_type());
  }
  const at::Tensor in = x.contiguous(), mul = scale.contiguous(), add = shift.contiguous();
  at::Tensor out = at::empty_like(in);
  const int64_t tokens = in.size(1), channels = in.size(2);
  WithElementType(
      out,
      [&](const auto* from, auto* to) {
        at::parallel_for(0, in.size(0) * tokens, RowGrain(channels),
                         [&](int64_t begin, int64_t end) {
                           for (int64_t row = begin; row < end; ++row) {
                             LayerNormRow(from + row * channels, ParameterRow(mul, row % tokens),
                                          ParameterRow(add, row % tokens), channels,
                                          static_cast<float>(eps), to + row * channels);
                           }
                         });
      },
      in);
  return out;
}

at::Tensor GatedAdd(const at::Tensor& x, const at::Tensor& y, const at::Tensor& gate) {
  CheckParameter(gate, y);
  if (!OnCpu(x)) {
    return at::addcmul(x.to(at::kFloat), y.to(at::kFloat), gate).to(x.scalar_type());
  }
  const at::Tensor base = x.contiguous(), add = y.contiguous(), mul = gate.contiguous();
  TORCH_CHECK(base.size(0) == 1 || base.size(0) == add.size(0), "cannot add ", add.sizes(), " to ",
              base.sizes());
  at::Tensor out = at::empty_like(add);
  const int64_t tokens = add.size(1), channels = add.size(2);
  const bool shared = base.size(0) == 1;
  WithElementType(
      out,
      [&](const auto* from, const auto* plus, auto* to) {
        at::parallel_for(
            0, add.size(0) * tokens, RowGrain(channels), [&](int64_t begin, int64_t end) {
              for (int64_t row = begin; row < end; ++row) {
                GatedAddRow(from + (shared ? row % tokens : row) * channels, plus + row * channels,
                            ParameterRow(mul, row % tokens), channels, to + row * channels);
              }
            });
      },
      base, add);
  return out;
}

at::Tensor RmsNormRotary(const at::Tensor& x, const at::Tensor& weight, double eps,
                         int64_t head_dim, const std::optional<Rotary>& rotary) {
  const int64_t groups = x.size(0), tokens = x.size(1), channels = x.size(2);
  if (!OnCpu(x)) {
    at::Tensor y = at::rms_norm(x, {channels}, weight, eps);
    if (!rotary) return y;
    y = y.view({groups, tokens, channels / head_dim, head_dim / 2, 2}).to(at::kFloat);
    const at::Tensor cos = rotary->cos.unsqueeze(1), sin = rotary->sin.unsqueeze(1);
    const at::Tensor a = y.select(-1, 0), b = y.select(-1, 1);
    return at::stack({a * cos - b * sin, a * sin + b * cos}, -1)
        .view({groups, tokens, channels})
        .to(x.scalar_type());
  }
  const at::Tensor in = x.contiguous(), w = weight.contiguous();
  const int64_t half = head_dim / 2;
  if (rotary) {
    TORCH_CHECK(rotary->cos.is_contiguous() && rotary->sin.is_contiguous() &&
                    rotary->cos.sizes() == at::IntArrayRef({tokens, half}) &&
                    rotary->sin.sizes() == rotary->cos.sizes() &&
                    rotary->cos.scalar_type() == at::kFloat,
                "rotary tables of shape ", rotary->cos.sizes(), " for ", tokens, " tokens");
  }
  at::Tensor out = at::empty_like(in);
  WithElementType(
      out,
      [&](const auto* from, const auto* by, auto* to) {
        at::parallel_for(0, groups * tokens, RowGrain(channels), [&](int64_t begin, int64_t end) {
          for (int64_t row = begin; row < end; ++row) {
            auto* y = to + row * channels;
            RmsNormRow(from + row * channels, by, channels, static_cast<float>(eps), y);
            if (rotary) {
              const int64_t token = row % tokens;
              RotateRow(y, rotary->cos.const_data_ptr<float>() + token * half,
                        rotary->sin.const_data_ptr<float>() + token * half, channels, head_dim);
            }
          }
        });
      },
      in, w);
  return out;
}

at::Tensor Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     int64_t num_heads, const std::optional<at::Tensor>& key_bias) {
  const auto heads = [num_heads](const at::Tensor& x) {
    return x.unflatten(2, {num_heads, -1}).transpose(1, 2);
  };
  std::optional<at::Tensor> mask;
  if (key_bias) {
    // Only the CPU kernel takes a float32 bias beside bfloat16 queries.
    mask = (OnCpu(q) ? *key_bias : key_bias->to(q.scalar_type())).view({1, 1, 1, -1});
  }
  return at::scaled_dot_product_attention(heads(q), heads(k), heads(v), mask)
      .transpose(1, 2)
      .flatten(2);
}

}  // namespace dlo
