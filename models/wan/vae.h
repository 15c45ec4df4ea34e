// AutoencoderKLWan (Wan 2.1 and 2.2): latents to video frames, and back.
//
//   WanVae vae(config.vae, [&](const std::string& name) { return tensors.at(name); });
//   at::Tensor z = DenormaliseLatents(config.vae, latents);
//   vae.Decode(z, [&](const at::Tensor& frames) { Write(frames); return true; });
//
// Decoding goes one latent frame at a time: memory is that of one latent frame's activations (4
// frames at full size) plus two frames a convolution, whatever the length of the video. With tiling
// it is that of a tile, plus the video itself.
//
// Weights and latents lie on one device and should be float32, as diffusers runs this model; the
// result is then diffusers' within 1e-5. The weights are copied into a layout of their own: nothing
// of the source is kept. Const members may be called from any thread. libtorch's exceptions
// (c10::Error for shapes that do not fit, out of memory) pass through.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "models/wan/vae_layers.h"
#include "models/wan/wan_config.h"

namespace dlo {

// Tiles of a video that is decoded in pieces, in pixels: diffusers' enable_tiling and its defaults.
// Neighbours overlap by size minus stride and are blended there. A video that fits into one tile is
// decoded whole.
struct WanVaeTiling {
  int64_t tile_height = 256;
  int64_t tile_width = 256;
  int64_t stride_height = 192;
  int64_t stride_width = 192;
};

struct WanVaeOptions {
  bool encoder = false;  // also build what Encode needs
  std::optional<WanVaeTiling> tiling;
};

class WanVae {
 public:
  // Called for each chunk of frames, float32 [n, height, width, 3] in 0..1, contiguous, on the
  // device; false stops decoding.
  using OnFrames = std::function<bool(const at::Tensor& frames)>;

  // Asks `weights` for every tensor that WanVaeSpecs(config, options.encoder) lists.
  WanVae(const WanVaeConfig& config, const VaeWeightSource& weights, WanVaeOptions options = {});
  ~WanVae();
  WanVae(WanVae&&) noexcept;
  WanVae& operator=(WanVae&&) noexcept;

  // z [1, z_dim, T, h, w], denormalised. The first chunk has one frame, each of the following T - 1
  // has scale_factor_temporal; with tiling all come at the end. `cancelled`, if given, is asked
  // before each latent frame (of each tile). False if either ended it early.
  bool Decode(const at::Tensor& z, const OnFrames& on_frames,
              const std::function<bool()>& cancelled = nullptr) const;

  // pixels [1, 3, F, height, width] in -1..1, F = 1 + k * scale_factor_temporal -> the mode of the
  // posterior [1, z_dim, T, h, w], not normalised. Needs options.encoder. Never tiled.
  at::Tensor Encode(const at::Tensor& pixels) const;

 private:
  class Decoder;
  class Encoder;

  WanVaeConfig config_;
  WanVaeOptions options_;
  std::unique_ptr<const Decoder> decoder_;
  std::unique_ptr<const Encoder> encoder_;
};

// latents [1, z_dim, T, h, w] of the diffusion process <-> those of the autoencoder. Scaling is by
// the float32 reciprocal of latents_std in both directions, as in diffusers.
at::Tensor DenormaliseLatents(const WanVaeConfig& config, const at::Tensor& latents);
at::Tensor NormaliseLatents(const WanVaeConfig& config, const at::Tensor& latents);

}  // namespace dlo
