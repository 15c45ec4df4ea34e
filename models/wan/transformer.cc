#include "models/wan/transformer.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "base/status_macros.h"

namespace dlo {
namespace {

struct AttentionWeights {
  LinearWeights q, k, v, out;
  at::Tensor norm_q, norm_k;
};

struct BlockWeights {
  at::Tensor scale_shift_table;
  AttentionWeights self, cross;
  at::Tensor norm2, norm2_bias;  // undefined without cross_attn_norm
  LinearWeights up, down;
};

// Binds views in the order in which WanTransformerSpecs lists a block's tensors.
BlockWeights Bind(const BlockLease& lease, at::Device device, bool cross_attn_norm) {
  std::vector<at::Tensor> views = BlockViews(lease, device);
  size_t next = 0;
  const auto take = [&](at::Tensor& to) { to = std::move(views.at(next++)); };
  const auto quantized = [](const LinearWeights& linear) {
    return linear.weight.scalar_type() == at::kFloat8_e4m3fn;
  };
  const auto take_linear = [&](LinearWeights& to) {
    take(to.weight);
    if (quantized(to)) take(to.scale);
    take(to.bias);
  };

  BlockWeights w;
  take(w.scale_shift_table);
  for (LinearWeights* linear : {&w.self.q, &w.self.k, &w.self.v}) {
    take(linear->weight);
    take(linear->bias);
  }
  if (quantized(w.self.q)) {
    take(w.self.q.scale);
    w.self.k.scale = w.self.v.scale = w.self.q.scale;
  }
  take_linear(w.self.out);
  take(w.self.norm_q);
  take(w.self.norm_k);
  for (LinearWeights* linear : {&w.cross.q, &w.cross.k, &w.cross.v, &w.cross.out}) {
    take_linear(*linear);
  }
  take(w.cross.norm_q);
  take(w.cross.norm_k);
  if (cross_attn_norm) {
    take(w.norm2);
    take(w.norm2_bias);
  }
  take_linear(w.up);
  take_linear(w.down);
  return w;
}

at::Tensor SelfAttention(const WanTransformerConfig& config, const AttentionWeights& w,
                         const at::Tensor& x, const Rotary& rotary, at::Tensor& scratch) {
  const int64_t head_dim = config.attention_head_dim;
  const at::Tensor q =
      RmsNormRotary(Linear(x, w.q, scratch), w.norm_q, config.eps, head_dim, rotary);
  const at::Tensor k =
      RmsNormRotary(Linear(x, w.k, scratch), w.norm_k, config.eps, head_dim, rotary);
  const at::Tensor v = Linear(x, w.v, scratch);
  return Linear(Attention(q, k, v, config.num_attention_heads), w.out, scratch);
}

// x [1 or G, L, D] -> [G, L, D], each branch against its own text.
at::Tensor CrossAttention(const WanTransformerConfig& config, const AttentionWeights& w,
                          const at::Tensor& x, int64_t block,
                          std::vector<WanContext::Branch>& branches, at::Tensor& scratch) {
  const at::Tensor q = RmsNormRotary(Linear(x, w.q, scratch), w.norm_q, config.eps,
                                     config.attention_head_dim, std::nullopt);
  std::vector<at::Tensor> attended;
  attended.reserve(branches.size());
  for (size_t g = 0; g < branches.size(); ++g) {
    WanContext::Branch& branch = branches[g];
    WanContext::KeysValues& kv = branch.blocks[block];
    if (!kv.keys.defined()) {
      kv.keys = RmsNormRotary(Linear(branch.text, w.k, scratch), w.norm_k, config.eps,
                              config.attention_head_dim, std::nullopt);
      kv.values = Linear(branch.text, w.v, scratch);
    }
    const at::Tensor own = q.size(0) == 1 ? q : q.narrow(0, static_cast<int64_t>(g), 1);
    attended.push_back(
        Attention(own, kv.keys, kv.values, config.num_attention_heads, branch.key_bias));
  }
  return Linear(attended.size() == 1 ? attended[0] : at::cat(attended), w.out, scratch);
}

// hidden [1 or G, L, D] b, modulation [R, 6, D] float32 without this block's table; `scratch` as in
// Linear.
at::Tensor Block(const WanTransformerConfig& config, const BlockWeights& w,
                 const at::Tensor& hidden, const at::Tensor& modulation, int64_t block,
                 WanContext& context, at::Tensor& scratch) {
  const std::vector<at::Tensor> m = (modulation + w.scale_shift_table).unbind(1);
  const at::Tensor &shift_a = m[0], &scale_a = m[1], &gate_a = m[2];
  const at::Tensor &shift_f = m[3], &scale_f = m[4], &gate_f = m[5];

  at::Tensor x = ScaledLayerNorm(hidden, scale_a + 1, shift_a, config.eps);
  x = GatedAdd(hidden, SelfAttention(config, w.self, x, context.rotary, scratch), gate_a);

  const at::Tensor normed =
      w.norm2.defined()
          ? ScaledLayerNorm(x, w.norm2.unsqueeze(0), w.norm2_bias.unsqueeze(0), config.eps)
          : x;
  x = x + CrossAttention(config, w.cross, normed, block, context.branches, scratch);

  at::Tensor f = ScaledLayerNorm(x, scale_f + 1, shift_f, config.eps);
  f = Linear(Linear(f, w.up, scratch, Activation::kGeluTanh), w.down, scratch);
  return GatedAdd(x, f, gate_f);
}

// [1, C, T, h, w] -> [1, L, C * pt * ph * pw], channels slowest within a patch.
at::Tensor Patchify(const at::Tensor& latents, const std::array<int64_t, 3>& patch) {
  const auto [pt, ph, pw] = patch;
  const int64_t c = latents.size(1);
  const int64_t t = latents.size(2) / pt, h = latents.size(3) / ph, w = latents.size(4) / pw;
  return latents.reshape({c, t, pt, h, ph, w, pw})
      .permute({1, 3, 5, 0, 2, 4, 6})
      .reshape({1, t * h * w, c * pt * ph * pw});
}

// [G, L, pt * ph * pw * C], channels fastest -> [G, C, T, h, w].
at::Tensor Unpatchify(const at::Tensor& tokens, const std::array<int64_t, 3>& patch,
                      const std::array<int64_t, 3>& latent_shape) {
  const auto [pt, ph, pw] = patch;
  const int64_t g = tokens.size(0), c = tokens.size(2) / (pt * ph * pw);
  const auto [frames, rows, columns] = latent_shape;
  return tokens.reshape({g, frames / pt, rows / ph, columns / pw, pt, ph, pw, c})
      .permute({0, 7, 1, 4, 2, 5, 3, 6})
      .reshape({g, c, frames, rows, columns});
}

// [R] float32 -> [R, dim]: cosines, then sines, of t / 10000^(k / (dim / 2)). Source: diffusers
// get_timestep_embedding with flip_sin_to_cos and no frequency shift.
at::Tensor TimestepEmbedding(const at::Tensor& timestep, int64_t dim) {
  const int64_t half = dim / 2;
  const auto options = at::TensorOptions().dtype(at::kFloat).device(timestep.device());
  const at::Tensor exponent = at::arange(half, options) * -std::log(10000.0) / half;
  const at::Tensor angle = timestep.to(at::kFloat).unsqueeze(1) * exponent.exp().unsqueeze(0);
  return at::cat({angle.cos(), angle.sin()}, 1);
}

}  // namespace

Rotary WanRotary(std::array<int64_t, 3> grid, int64_t head_dim) {
  const int64_t side = 2 * (head_dim / 6);
  const std::array<int64_t, 3> dims = {head_dim - 2 * side, side, side};
  std::vector<at::Tensor> angles;
  for (int axis = 0; axis < 3; ++axis) {
    const at::Tensor k = at::arange(0, dims[axis], 2, at::kDouble);
    const at::Tensor frequency =
        at::pow(at::scalar_tensor(10000.0, at::kDouble), k / dims[axis]).reciprocal();
    const at::Tensor angle = at::outer(at::arange(grid[axis], at::kDouble), frequency);
    std::vector<int64_t> shape = {1, 1, 1, dims[axis] / 2};
    shape[axis] = grid[axis];
    angles.push_back(angle.view(shape).expand({grid[0], grid[1], grid[2], dims[axis] / 2}));
  }
  const at::Tensor angle = at::cat(angles, 3).flatten(0, 2);
  return {angle.cos().to(at::kFloat), angle.sin().to(at::kFloat)};
}

WanTransformer::WanTransformer(const WanTransformerConfig& config, ComponentWeights weights)
    : config_(config), weights_(std::move(weights)) {}

at::ScalarType WanTransformer::dtype() const {
  return weights_.tensor("patch_embedding.weight").scalar_type();
}

WanContext WanTransformer::Prepare(std::array<int64_t, 3> latent_shape,
                                   const std::vector<TextEmbedding>& branches) const {
  WanContext context;
  context.latent_shape = latent_shape;
  std::array<int64_t, 3> grid;
  for (int axis = 0; axis < 3; ++axis) grid[axis] = latent_shape[axis] / config_.patch_size[axis];
  const Rotary rotary = WanRotary(grid, config_.attention_head_dim);
  context.rotary = {rotary.cos.to(weights_.device()), rotary.sin.to(weights_.device())};

  const auto embed = [this](const at::Tensor& x) {
    const std::string name = "condition_embedder.text_embedder.linear_";
    const at::Tensor y = Linear(x, weights_.tensor(name + "1.weight"),
                                weights_.tensor(name + "1.bias"), Activation::kGeluTanh);
    return Linear(y, weights_.tensor(name + "2.weight"), weights_.tensor(name + "2.bias"));
  };
  for (const TextEmbedding& text : branches) {
    WanContext::Branch branch;
    at::Tensor rows = text.rows.to(weights_.device(), dtype());
    if (text.num_padding_rows > 0) {
      rows = at::cat({rows, at::zeros({1, rows.size(1)}, rows.options())});
      at::Tensor bias = at::zeros({rows.size(0)}, rows.options().dtype(at::kFloat));
      bias[-1] = std::log(static_cast<double>(text.num_padding_rows));
      branch.key_bias = bias;
    }
    branch.text = embed(rows.unsqueeze(0));
    branch.blocks.resize(config_.num_layers);
    context.branches.push_back(std::move(branch));
  }
  return context;
}

absl::StatusOr<at::Tensor> WanTransformer::Forward(const at::Tensor& latents,
                                                   const at::Tensor& timestep,
                                                   WanContext& context) {
  const at::ScalarType b = dtype();
  const auto weight = [this](const char* name) -> const at::Tensor& {
    return weights_.tensor(name);
  };

  at::Tensor x =
      Linear(Patchify(latents.to(b), config_.patch_size),
             weight("patch_embedding.weight").flatten(1), weight("patch_embedding.bias"));

  // The time embedder computes in float32; its result is rounded once, before the activation of
  // time_proj.
  at::Tensor time = TimestepEmbedding(timestep.to(x.device()), config_.freq_dim);
  time = Linear(time, weight("condition_embedder.time_embedder.linear_1.weight"),
                weight("condition_embedder.time_embedder.linear_1.bias"));
  time = Linear(at::silu(time), weight("condition_embedder.time_embedder.linear_2.weight"),
                weight("condition_embedder.time_embedder.linear_2.bias"))
             .to(b);
  const at::Tensor modulation =
      Linear(at::silu(time), weight("condition_embedder.time_proj.weight"),
             weight("condition_embedder.time_proj.bias"))
          .unflatten(1, {6, -1})
          .to(at::kFloat);

  at::Tensor scratch;
  weights_.ring().Rewind();  // an earlier forward may have ended early
  for (int64_t block = 0; block < config_.num_layers; ++block) {
    ASSIGN_OR_RETURN(const BlockLease lease, weights_.ring().Acquire());
    x = Block(config_, Bind(lease, weights_.device(), config_.cross_attn_norm), x, modulation,
              block, context, scratch);
  }

  const at::Tensor table = weight("scale_shift_table") + time.unsqueeze(1);  // [R, 2, D] float32
  x = ScaledLayerNorm(x, table.select(1, 1) + 1, table.select(1, 0), config_.eps);
  x = Linear(x, weight("proj_out.weight"), weight("proj_out.bias"));
  return Unpatchify(x, config_.patch_size, context.latent_shape);
}

}  // namespace dlo
