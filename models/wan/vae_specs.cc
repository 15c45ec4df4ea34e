#include "models/wan/vae_specs.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace dlo {
namespace {

bool IsLast(size_t stage, const WanVaeConfig& config) {
  return stage + 1 == config.dim_mult.size();
}

// Tensors are collected in a list by these, one function a kind of layer.
class SpecList {
 public:
  void Conv(const std::string& prefix, int64_t in, int64_t out, std::vector<int64_t> kernel) {
    std::vector<int64_t> shape = {out, in};
    shape.insert(shape.end(), kernel.begin(), kernel.end());
    Add(absl::StrCat(prefix, ".weight"), std::move(shape));
    Add(absl::StrCat(prefix, ".bias"), {out});
  }

  void Norm(const std::string& prefix, int64_t channels) {
    Add(absl::StrCat(prefix, ".gamma"), {channels, 1, 1, 1});
  }

  void Resnet(const VaeResnet& resnet) {
    Norm(resnet.prefix + ".norm1", resnet.in_channels);
    Conv(resnet.prefix + ".conv1", resnet.in_channels, resnet.out_channels, {3, 3, 3});
    Norm(resnet.prefix + ".norm2", resnet.out_channels);
    Conv(resnet.prefix + ".conv2", resnet.out_channels, resnet.out_channels, {3, 3, 3});
    if (resnet.in_channels != resnet.out_channels) {
      Conv(resnet.prefix + ".conv_shortcut", resnet.in_channels, resnet.out_channels, {1, 1, 1});
    }
  }

  void Attention(const std::string& prefix, int64_t channels) {
    Add(absl::StrCat(prefix, ".norm.gamma"), {channels, 1, 1});
    Conv(prefix + ".to_qkv", channels, 3 * channels, {1, 1});
    Conv(prefix + ".proj", channels, channels, {1, 1});
  }

  void Stage(const VaeStage& stage) {
    for (const VaeResnet& resnet : stage.resnets) Resnet(resnet);
    if (stage.resample == Resample::kNone) return;
    Conv(stage.resample_prefix + ".resample.1", stage.out_channels, stage.resample_channels,
         {3, 3});
    if (stage.resample == Resample::kUpsample3d) {
      Conv(stage.resample_prefix + ".time_conv", stage.out_channels, 2 * stage.out_channels,
           {3, 1, 1});
    } else if (stage.resample == Resample::kDownsample3d) {
      Conv(stage.resample_prefix + ".time_conv", stage.out_channels, stage.out_channels, {3, 1, 1});
    }
  }

  void Half(const VaeHalf& half) {
    Conv(half.prefix + "conv_in", half.in_channels, half.first_channels, {3, 3, 3});
    const std::string mid = half.prefix + "mid_block.";
    Resnet({mid + "resnets.0", half.mid_channels, half.mid_channels});
    Attention(mid + "attentions.0", half.mid_channels);
    Resnet({mid + "resnets.1", half.mid_channels, half.mid_channels});
    for (const VaeStage& stage : half.stages) Stage(stage);
    Norm(half.prefix + "norm_out", half.last_channels);
    Conv(half.prefix + "conv_out", half.last_channels, half.out_channels, {3, 3, 3});
  }

  std::vector<TensorSpec> Take() { return std::move(specs_); }

 private:
  void Add(std::string name, std::vector<int64_t> shape) {
    specs_.push_back({.name = std::move(name), .shape = std::move(shape), .dtype = DType::kF32});
  }

  std::vector<TensorSpec> specs_;
};

}  // namespace

VaeHalf WanVaeEncoderHalf(const WanVaeConfig& config) {
  VaeHalf half{.prefix = "encoder.", .in_channels = config.in_channels};
  half.first_channels = config.base_dim;
  int64_t channels = half.first_channels;
  int64_t flat = 0;  // Wan 2.1 numbers residual blocks and resamplers in one list
  for (size_t i = 0; i < config.dim_mult.size(); ++i) {
    VaeStage stage{.in_channels = channels, .out_channels = config.base_dim * config.dim_mult[i]};
    const std::string block = absl::StrCat("encoder.down_blocks.", i);
    for (int64_t r = 0; r < config.num_res_blocks; ++r) {
      stage.resnets.push_back({config.is_residual ? absl::StrCat(block, ".resnets.", r)
                                                  : absl::StrCat("encoder.down_blocks.", flat++),
                               channels, stage.out_channels});
      channels = stage.out_channels;
    }
    if (!IsLast(i, config)) {
      stage.resample =
          config.temperal_downsample[i] ? Resample::kDownsample3d : Resample::kDownsample2d;
      stage.resample_prefix = config.is_residual ? absl::StrCat(block, ".downsampler")
                                                 : absl::StrCat("encoder.down_blocks.", flat++);
    }
    stage.resample_channels = stage.out_channels;
    stage.shortcut = config.is_residual;
    half.stages.push_back(std::move(stage));
  }
  half.mid_channels = half.last_channels = channels;
  half.out_channels = 2 * config.z_dim;  // mean and log-variance
  return half;
}

VaeHalf WanVaeDecoderHalf(const WanVaeConfig& config) {
  VaeHalf half{.prefix = "decoder.", .in_channels = config.z_dim};
  half.first_channels = half.mid_channels = config.decoder_dim() * config.dim_mult.back();
  int64_t channels = half.mid_channels;
  const size_t stages = config.dim_mult.size();
  for (size_t i = 0; i < stages; ++i) {
    VaeStage stage{.in_channels = channels,
                   .out_channels = config.decoder_dim() * config.dim_mult[stages - 1 - i]};
    const std::string block = absl::StrCat("decoder.up_blocks.", i);
    for (int64_t r = 0; r <= config.num_res_blocks; ++r) {
      stage.resnets.push_back({absl::StrCat(block, ".resnets.", r), channels, stage.out_channels});
      channels = stage.out_channels;
    }
    if (!IsLast(i, config)) {
      stage.resample = config.temperal_downsample[config.temperal_downsample.size() - 1 - i]
                           ? Resample::kUpsample3d
                           : Resample::kUpsample2d;
      stage.resample_prefix =
          absl::StrCat(block, config.is_residual ? ".upsampler" : ".upsamplers.0");
      if (!config.is_residual) channels /= 2;
      stage.shortcut = config.is_residual;
    }
    stage.resample_channels = channels;
    half.stages.push_back(std::move(stage));
  }
  half.last_channels = channels;
  half.out_channels = config.out_channels;
  return half;
}

std::vector<TensorSpec> WanVaeSpecs(const WanVaeConfig& config, bool encoder) {
  SpecList specs;
  if (encoder) {
    specs.Half(WanVaeEncoderHalf(config));
    specs.Conv("quant_conv", 2 * config.z_dim, 2 * config.z_dim, {1, 1, 1});
  }
  specs.Conv("post_quant_conv", config.z_dim, config.z_dim, {1, 1, 1});
  specs.Half(WanVaeDecoderHalf(config));
  return specs.Take();
}

}  // namespace dlo
