// WanTransformer3DModel: the velocity of a video latent, for all branches of guidance at once.
//
//   WanTransformer transformer(config, std::move(weights));
//   WanContext context = transformer.Prepare({21, 60, 104}, {positive, negative});
//   ASSIGN_OR_RETURN(at::Tensor velocity, transformer.Forward(latents, timestep, context));
//
// All branches pass through one block before the next is asked for, so weights that are streamed
// cross the bus once a step. What branches share is computed once: the latents' embedding, the
// modulation and block 0's self-attention.
//
// Numerics follow diffusers 0.42: the residual stream in the run dtype b (the dtype of
// patch_embedding), normalisation, modulation and rotary products in float32 with one rounding.
// Belongs to one thread; throws c10::Error where libtorch does.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "models/component_weights.h"
#include "models/ops/ops.h"
#include "models/wan/wan_config.h"

namespace dlo {

// One prompt as the text encoder gives it: `rows` [n, text_dim], then `num_padding_rows` rows of
// zeros that take part in cross-attention (the transformer has no text mask). Equal rows are equal
// keys: they are computed once and weighted by their number.
struct TextEmbedding {
  at::Tensor rows;
  int64_t num_padding_rows = 0;
};

// What of a request stays the same over its denoising steps, for one transformer. Grows by the text
// keys and values of each block as the first step meets it.
struct WanContext {
  struct KeysValues {
    at::Tensor keys;    // [1, n, D] b
    at::Tensor values;  // [1, n, D] b
  };
  struct Branch {
    at::Tensor text;                     // [1, n, D] b, embedded
    std::optional<at::Tensor> key_bias;  // [n] float32: log of how often each row stands
    std::vector<KeysValues> blocks;      // of cross-attention, once computed
  };

  std::array<int64_t, 3> latent_shape;  // frames, rows, columns
  Rotary rotary;                        // [L, head_dim / 2]
  std::vector<Branch> branches;
};

class WanTransformer {
 public:
  WanTransformer(const WanTransformerConfig& config, ComponentWeights weights);

  const WanTransformerConfig& config() const { return config_; }
  // To be brought in before Prepare and put out after the last Forward.
  ComponentWeights& weights() { return weights_; }
  at::ScalarType dtype() const;

  // `latent_shape` in latent frames, rows and columns, multiples of the patch size.
  WanContext Prepare(std::array<int64_t, 3> latent_shape,
                     const std::vector<TextEmbedding>& branches) const;

  // latents [1, C, frames, rows, columns] b, timestep [1] (one for all tokens) or [L] float32 ->
  // velocity [G, C, frames, rows, columns] b for the context's G branches. The error is the ring's,
  // if it cannot deliver a block.
  absl::StatusOr<at::Tensor> Forward(const at::Tensor& latents, const at::Tensor& timestep,
                                     WanContext& context);

 private:
  WanTransformerConfig config_;
  ComponentWeights weights_;
};

// Rotary angles for a grid of tokens (frames, rows, columns of patches), in row-major order: [L,
// head_dim / 2] float32. Source: diffusers WanRotaryPosEmbed; frequencies and angles in float64.
Rotary WanRotary(std::array<int64_t, 3> grid, int64_t head_dim);

}  // namespace dlo
