// What AutoencoderKLWan (Wan 2.1 and 2.2) is made of, from its configuration alone: the walk of
// stages that the network follows and the tensors that a checkpoint must hold. Torch-free.
//
//   for (const TensorSpec& spec : WanVaeSpecs(config.vae, /*encoder=*/false)) plan.Require(spec);
//
// Pure functions; safe from any thread. They expect a configuration that ReadWanConfig accepted.
// Source of names and shapes: diffusers 0.42 AutoencoderKLWan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/tensor_spec.h"
#include "models/wan/wan_config.h"

namespace dlo {

// How a stage changes the size of its frames at its end. "3d" changes time as well as space.
enum class Resample { kNone, kUpsample2d, kUpsample3d, kDownsample2d, kDownsample3d };

inline bool IsDownsample(Resample mode) {
  return mode == Resample::kDownsample2d || mode == Resample::kDownsample3d;
}

// One residual block: prefix of its tensors and channels.
struct VaeResnet {
  std::string prefix;
  int64_t in_channels = 0;
  int64_t out_channels = 0;
};

// Residual blocks at one resolution, then at most one change of resolution.
struct VaeStage {
  int64_t in_channels = 0;
  int64_t out_channels = 0;  // of the last residual block
  std::vector<VaeResnet> resnets;
  Resample resample = Resample::kNone;
  std::string resample_prefix;
  int64_t resample_channels = 0;  // after the resampling; out_channels without one
  bool shortcut =
      false;  // Wan 2.2: a parameter-free path around the whole stage (AvgDown3D, DupUp3D)
};

// The encoder or the decoder: conv_in, mid block and stages (in this order for the decoder, the mid
// block last for the encoder), norm_out, SiLU, conv_out.
struct VaeHalf {
  std::string prefix;  // "encoder." or "decoder."
  int64_t in_channels = 0;
  int64_t first_channels = 0;  // after conv_in
  int64_t mid_channels = 0;
  std::vector<VaeStage> stages;
  int64_t last_channels = 0;  // before conv_out
  int64_t out_channels = 0;
};

VaeHalf WanVaeEncoderHalf(const WanVaeConfig& config);
VaeHalf WanVaeDecoderHalf(const WanVaeConfig& config);

// Every tensor of the autoencoder in diffusers' naming, all float32: what decoding needs
// ("decoder.*", "post_quant_conv.*") and, if `encoder`, also "encoder.*" and "quant_conv.*".
// Full-size Wan 2.1 has 194 with the encoder, Wan 2.2 has 196.
std::vector<TensorSpec> WanVaeSpecs(const WanVaeConfig& config, bool encoder);

}  // namespace dlo
