#include "models/umt5/umt5.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace dlo {
namespace {

struct BlockWeights {
  at::Tensor attention_norm, q, k, v, o, position_bias;
  at::Tensor ffn_norm, wi_0, wi_1, wo;
};

// Binds views in the order in which Umt5Specs lists a block's tensors.
BlockWeights Bind(const BlockLease& lease, at::Device device) {
  std::vector<at::Tensor> views = BlockViews(lease, device);
  BlockWeights w;
  size_t next = 0;
  for (at::Tensor* t : {&w.attention_norm, &w.q, &w.k, &w.v, &w.o, &w.position_bias, &w.ffn_norm,
                        &w.wi_0, &w.wi_1, &w.wo}) {
    *t = std::move(views.at(next++));
  }
  return w;
}

// Normalised in float32, rounded, then weighted in the run dtype.
at::Tensor RmsNorm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor f = x.to(at::kFloat);
  const at::Tensor variance = f.square().mean(-1, /*keepdim=*/true);
  return weight * (f * at::rsqrt(variance + eps)).to(weight.scalar_type());
}

// The tanh approximation of GELU, operation by operation as transformers' NewGELUActivation: in
// bfloat16 each one rounds.
at::Tensor GeluNew(const at::Tensor& x) {
  if (x.scalar_type() == at::kFloat) return at::gelu(x, "tanh");
  const at::Tensor inner = (x + at::pow(x, 3.0) * 0.044715) * std::sqrt(2.0 / M_PI);
  return x * 0.5 * (at::tanh(inner) + 1.0);
}

at::Tensor Block(const Umt5Config& config, const BlockWeights& w, const at::Tensor& hidden,
                 const at::Tensor& buckets) {
  const auto heads = [&](const at::Tensor& x) {
    return x.view({1, x.size(1), config.num_heads, config.d_kv}).transpose(1, 2);
  };
  at::Tensor x = hidden;
  at::Tensor n = RmsNorm(x, w.attention_norm, config.layer_norm_epsilon);
  const at::Tensor bias = at::embedding(w.position_bias, buckets).permute({2, 0, 1}).unsqueeze(0);
  const at::Tensor attended = at::scaled_dot_product_attention(
      heads(at::linear(n, w.q)), heads(at::linear(n, w.k)), heads(at::linear(n, w.v)),
      bias.contiguous(), /*dropout_p=*/0.0, /*is_causal=*/false, /*scale=*/1.0);
  x = x + at::linear(attended.transpose(1, 2).flatten(2), w.o);

  n = RmsNorm(x, w.ffn_norm, config.layer_norm_epsilon);
  return x + at::linear(GeluNew(at::linear(n, w.wi_0)) * at::linear(n, w.wi_1), w.wo);
}

}  // namespace

at::Tensor RelativePositionBuckets(int64_t length, int64_t num_buckets, int64_t max_distance) {
  const at::Tensor position = at::arange(length);
  const at::Tensor relative = position.unsqueeze(0) - position.unsqueeze(1);  // key - query
  const int64_t per_side = num_buckets / 2, exact = per_side / 2;
  const at::Tensor distance = relative.abs();
  const double ratio = std::log(static_cast<double>(max_distance) / exact);
  const at::Tensor far =
      ((distance.to(at::kFloat) / exact).log() / ratio * (per_side - exact)).to(at::kLong) + exact;
  const at::Tensor bucket = at::where(distance < exact, distance, far.clamp_max(per_side - 1));
  return bucket + (relative > 0).to(at::kLong) * per_side;
}

Umt5Encoder::Umt5Encoder(const Umt5Config& config, ComponentWeights weights, HostTable tokens)
    : config_(config), weights_(std::move(weights)), tokens_(std::move(tokens)) {}

absl::StatusOr<at::Tensor> Umt5Encoder::Encode(const std::vector<int64_t>& ids) {
  for (int64_t id : ids) {
    if (id < 0 || id >= config_.vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("token id ", id, " is outside the text encoder's vocabulary of ",
                       config_.vocab_size, ": tokenizer and text encoder do not belong together"));
    }
  }
  const int64_t length = static_cast<int64_t>(ids.size());
  const at::Tensor rows = at::empty({length, config_.d_model}, TorchDType(tokens_.dtype()));
  RETURN_IF_ERROR(tokens_.ReadRows(ids, static_cast<std::byte*>(rows.data_ptr())));
  at::Tensor x = rows.to(weights_.device()).unsqueeze(0);
  const at::Tensor buckets = RelativePositionBuckets(length, config_.relative_attention_num_buckets,
                                                     config_.relative_attention_max_distance)
                                 .to(weights_.device());
  weights_.ring().Rewind();  // an earlier forward may have ended early
  for (int64_t block = 0; block < config_.num_layers; ++block) {
    ASSIGN_OR_RETURN(const BlockLease lease, weights_.ring().Acquire());
    x = Block(config_, Bind(lease, weights_.device()), x, buckets);
  }
  x = RmsNorm(x, weights_.tensor("encoder.final_layer_norm.weight"), config_.layer_norm_epsilon);
  return x.squeeze(0);
}

}  // namespace dlo
