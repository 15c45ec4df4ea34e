#include "models/wan/vae.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "models/wan/vae_specs.h"

namespace dlo {
namespace {

// [1, C, n, H, W] -> frames [n, H, W, C], and back.
at::Tensor ToFrames(const at::Tensor& video) {
  return video.squeeze(0).permute({1, 2, 3, 0}).contiguous();
}
at::Tensor FromFrames(const at::Tensor& frames) {
  return frames.permute({3, 0, 1, 2}).unsqueeze(0).contiguous();
}

std::vector<StageLayers> MakeStages(VaeLayerLoader& loader, const VaeHalf& half) {
  std::vector<StageLayers> stages;
  for (const VaeStage& stage : half.stages) stages.emplace_back(loader, stage);
  return stages;
}

// The last `extent` pixels of `before` fade into the first of `tile` along an axis, in place.
void Blend(const at::Tensor& before, const at::Tensor& tile, int64_t axis, int64_t extent) {
  extent = std::min({extent, before.size(axis), tile.size(axis)});
  if (extent <= 0) return;
  // Weights in float64, rounded once each, as Python's scalars are.
  const at::Tensor fade = at::arange(extent, at::kDouble).div_(static_cast<double>(extent));
  std::vector<int64_t> along(tile.dim(), 1);
  along[axis] = extent;
  const at::Tensor rise = fade.to(tile.options()).view(along);
  const at::Tensor fall = (1 - fade).to(tile.options()).view(along);
  at::Tensor head = tile.narrow(axis, 0, extent);
  head.copy_(before.narrow(axis, before.size(axis) - extent, extent) * fall + head * rise);
}

at::Tensor Statistic(const std::vector<double>& values, const at::Tensor& latents) {
  TORCH_CHECK(latents.dim() == 5 && static_cast<size_t>(latents.size(1)) == values.size(),
              "latents of shape ", latents.sizes(), " do not have the VAE's ", values.size(),
              " channels");
  return at::tensor(values, at::kFloat).to(latents.options()).view({1, -1, 1, 1, 1});
}

}  // namespace

class WanVae::Decoder {
 public:
  Decoder(VaeLayerLoader loader, const VaeHalf& half)
      : post_quant_(loader, "post_quant_conv"),
        conv_in_(loader, half.prefix + "conv_in"),
        mid_(loader, half.prefix + "mid_block", half.mid_channels),
        stages_(MakeStages(loader, half)),
        head_(loader, half.prefix + "norm_out", half.prefix + "conv_out"),
        num_slots_(loader.num_slots()) {}

  // z frames [T, h, w, z_dim]: decodes one latent frame after another into chunks [n, H, W,
  // out_channels]. False if stopped.
  bool Run(const at::Tensor& z, const std::function<bool()>& cancelled,
           const std::function<bool(at::Tensor chunk)>& on_chunk) const {
    VaeStream stream(num_slots_);
    for (int64_t i = 0; i < z.size(0); ++i) {
      if (cancelled && cancelled()) return false;
      at::Tensor x = conv_in_.Forward(post_quant_.Forward(z.narrow(0, i, 1)), stream);
      x = mid_.Forward(x, stream);
      for (const StageLayers& stage : stages_) x = stage.Forward(x, stream);
      x = head_.Forward(std::move(x), stream);
      stream.EndChunk();
      if (!on_chunk(std::move(x))) return false;
    }
    return true;
  }

  // The same over overlapping tiles, blended into one video [F, H, W, out_channels]; undefined if
  // stopped. Sizes of `tiling` are latent ones; `scale` is from latent to output positions.
  at::Tensor RunTiled(const at::Tensor& z, const WanVaeTiling& tiling, int64_t scale,
                      const std::function<bool()>& cancelled) const {
    const int64_t height = z.size(1) * scale, width = z.size(2) * scale;
    const int64_t stride_height = tiling.stride_height * scale;
    const int64_t stride_width = tiling.stride_width * scale;
    const int64_t blend_height = tiling.tile_height * scale - stride_height;
    const int64_t blend_width = tiling.tile_width * scale - stride_width;
    at::Tensor video;
    std::vector<at::Tensor> above;
    for (int64_t y = 0; y < z.size(1); y += tiling.stride_height) {
      const at::Tensor band = z.narrow(1, y, std::min(tiling.tile_height, z.size(1) - y));
      std::vector<at::Tensor> row;
      for (int64_t x = 0; x < z.size(2); x += tiling.stride_width) {
        std::vector<at::Tensor> chunks;
        const bool done = Run(
            band.narrow(2, x, std::min(tiling.tile_width, z.size(2) - x)).contiguous(), cancelled,
            [&](at::Tensor chunk) { return chunks.push_back(std::move(chunk)), true; });
        if (!done) return {};
        const at::Tensor tile = at::cat(chunks);
        // Neighbours are already blended themselves, as in diffusers.
        if (!above.empty()) Blend(above[row.size()], tile, 1, blend_height);
        if (!row.empty()) Blend(row.back(), tile, 2, blend_width);
        row.push_back(tile);
        if (!video.defined()) {
          video = at::empty({tile.size(0), height, width, tile.size(3)}, tile.options());
        }
        const int64_t rows = std::min({stride_height, tile.size(1), height - y * scale});
        const int64_t columns = std::min({stride_width, tile.size(2), width - x * scale});
        video.narrow(1, y * scale, rows)
            .narrow(2, x * scale, columns)
            .copy_(tile.narrow(1, 0, rows).narrow(2, 0, columns));
      }
      above = std::move(row);
    }
    return video;
  }

 private:
  Conv post_quant_;
  CausalConv conv_in_;
  MidBlock mid_;
  std::vector<StageLayers> stages_;
  NormSiluConv head_;
  int num_slots_;
};

class WanVae::Encoder {
 public:
  Encoder(VaeLayerLoader loader, const VaeHalf& half)
      : conv_in_(loader, half.prefix + "conv_in"),
        stages_(MakeStages(loader, half)),
        mid_(loader, half.prefix + "mid_block", half.mid_channels),
        head_(loader, half.prefix + "norm_out", half.prefix + "conv_out"),
        quant_(loader, "quant_conv"),
        num_slots_(loader.num_slots()) {}

  // Frames [F, H, W, in_channels] -> mean and log-variance [T, h, w, 2 * z_dim].
  at::Tensor Run(const at::Tensor& frames, int64_t chunk_frames) const {
    VaeStream stream(num_slots_);
    std::vector<at::Tensor> chunks;
    for (int64_t begin = 0; begin < frames.size(0);) {
      const int64_t n = begin == 0 ? 1 : chunk_frames;
      at::Tensor x = conv_in_.Forward(frames.narrow(0, begin, n), stream);
      for (const StageLayers& stage : stages_) x = stage.Forward(x, stream);
      chunks.push_back(quant_.Forward(head_.Forward(mid_.Forward(x, stream), stream)));
      stream.EndChunk();
      begin += n;
    }
    return at::cat(chunks);
  }

 private:
  CausalConv conv_in_;
  std::vector<StageLayers> stages_;
  MidBlock mid_;
  NormSiluConv head_;
  Conv quant_;
  int num_slots_;
};

WanVae::WanVae(const WanVaeConfig& config, const VaeWeightSource& weights, WanVaeOptions options)
    : config_(config), options_(options) {
  const c10::NoGradGuard no_grad;
  if (options_.tiling) {
    const WanVaeTiling& t = *options_.tiling;
    for (int64_t pixels : {t.tile_height, t.tile_width, t.stride_height, t.stride_width}) {
      TORCH_CHECK(pixels > 0 && pixels % config.scale_factor_spatial == 0,
                  "tile sizes and strides must be positive multiples of ",
                  config.scale_factor_spatial, ", but one is ", pixels);
    }
    TORCH_CHECK(t.stride_height <= t.tile_height && t.stride_width <= t.tile_width,
                "the stride of tiles must not exceed their size");
  }
  decoder_ = std::make_unique<const Decoder>(VaeLayerLoader(weights), WanVaeDecoderHalf(config));
  if (options_.encoder) {
    encoder_ = std::make_unique<const Encoder>(VaeLayerLoader(weights), WanVaeEncoderHalf(config));
  }
}

WanVae::~WanVae() = default;
WanVae::WanVae(WanVae&&) noexcept = default;
WanVae& WanVae::operator=(WanVae&&) noexcept = default;

bool WanVae::Decode(const at::Tensor& z, const OnFrames& on_frames,
                    const std::function<bool()>& cancelled) const {
  TORCH_CHECK(z.dim() == 5 && z.size(0) == 1 && z.size(1) == config_.z_dim && z.numel() > 0,
              "latents must be [1, ", config_.z_dim, ", T, h, w], but are ", z.sizes());
  const c10::NoGradGuard no_grad;
  const auto emit = [&](const at::Tensor& chunk) {
    at::Tensor frames = config_.patch_size ? Unpatchify(chunk, *config_.patch_size) : chunk;
    return on_frames(frames.clamp(-1, 1).mul_(0.5).add_(0.5));
  };
  const at::Tensor latents = ToFrames(z);
  if (options_.tiling) {
    const int64_t space = config_.scale_factor_spatial;
    const WanVaeTiling latent{
        options_.tiling->tile_height / space, options_.tiling->tile_width / space,
        options_.tiling->stride_height / space, options_.tiling->stride_width / space};
    if (z.size(3) > latent.tile_height || z.size(4) > latent.tile_width) {
      const at::Tensor video =
          decoder_->RunTiled(latents, latent, space / config_.patch_size.value_or(1), cancelled);
      if (!video.defined()) return false;
      for (int64_t begin = 0, n = 1; begin < video.size(0);
           begin += n, n = config_.scale_factor_temporal) {
        if (!emit(video.narrow(0, begin, n))) return false;
      }
      return true;
    }
  }
  return decoder_->Run(latents, cancelled, emit);
}

at::Tensor WanVae::Encode(const at::Tensor& pixels) const {
  TORCH_CHECK(encoder_ != nullptr, "this WanVae was built without options.encoder");
  const int64_t time = config_.scale_factor_temporal, space = config_.scale_factor_spatial;
  TORCH_CHECK(pixels.dim() == 5 && pixels.size(0) == 1 && pixels.size(1) == 3 &&
                  (pixels.size(2) - 1) % time == 0 && pixels.size(3) % space == 0 &&
                  pixels.size(4) % space == 0 && pixels.numel() > 0,
              "pixels must be [1, 3, 1 + a multiple of ", time, ", multiples of ", space, ", ",
              space, "], but are ", pixels.sizes());
  const c10::NoGradGuard no_grad;
  at::Tensor frames = ToFrames(pixels);
  if (config_.patch_size) frames = Patchify(frames, *config_.patch_size);
  return FromFrames(encoder_->Run(frames, time).narrow(3, 0, config_.z_dim));
}

at::Tensor DenormaliseLatents(const WanVaeConfig& config, const at::Tensor& latents) {
  return latents / Statistic(config.latents_std, latents).reciprocal() +
         Statistic(config.latents_mean, latents);
}

at::Tensor NormaliseLatents(const WanVaeConfig& config, const at::Tensor& latents) {
  return (latents - Statistic(config.latents_mean, latents)) *
         Statistic(config.latents_std, latents).reciprocal();
}

}  // namespace dlo
