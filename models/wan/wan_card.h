// The model card of a Wan repository: its defaults, limits and request checks. Torch-free.
//
//   ASSIGN_OR_RETURN(std::unique_ptr<ModelCard> card, ReadWanCard(root));
//
// Defaults, by family:
//
//   family             recognised by       size      frames  fps  steps  guidance
//   Wan 2.1 T2V        neither below       832x480   81      16   50     5
//   Wan 2.2 T2V A14B   two experts         832x480   81      16   40     4, low-noise expert 3
//   Wan 2.2 TI2V 5B    expand_timesteps    1280x704  121     24   50     5
//
// Solver and flow_shift default to those of scheduler/scheduler_config.json (the Wan repositories
// say 3.0, TI2V 5.0; the original A14B code samples with 12). An optional `dlo.json` at the
// repository's root overrides any of width, height, num_frames, fps, num_inference_steps,
// guidance_scale, guidance_scale_2, flow_shift and solver.
//
// Rounding, as in diffusers' WanPipeline: a size must be a multiple of 16 and is floored to the
// model's patch (32 for the VAE that shrinks 16 times); num_frames that is not a multiple of the
// VAE's temporal factor (4) plus one becomes the multiple at or below it, plus one (6 and 7 become
// 5, 8 becomes 9). Guidance runs exactly when guidance_scale is above 1; a request that gives
// guidance_scale and not guidance_scale_2 has the same value for both experts.
//
// Any seed is valid. The noise of the CPU generator depends on its low 32 bits only: 2^32 + 5 gives
// the video of 5.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/model_card.h"
#include "models/wan/wan_config.h"

namespace dlo {

// What one request may ask for at most, beyond what the model's architecture allows.
struct WanLimits {
  int64_t tokens_max = 1 << 18;  // of the transformer: frames * rows * columns of patches (720p
                                 // with 121 frames has 111,600)
  int64_t num_inference_steps_max = 1000;
  double fps_max = 240;
  double guidance_scale_max = 100;
  int64_t pixels_max = 16384;  // of width and of height
  int64_t prompt_bytes_max = 32 << 10;
};

class WanCard final : public ModelCard {
 public:
  // INVALID_ARGUMENT if `defaults` are not settings that the model can run.
  static absl::StatusOr<std::unique_ptr<WanCard>> Create(std::string name, WanConfig config,
                                                         const RequestedSettings& defaults,
                                                         const WanLimits& limits);

  const std::string& name() const override { return name_; }
  const WanConfig& config() const { return config_; }

  std::vector<FieldViolation> Resolve(const RequestedSettings& requested, uint64_t random_seed,
                                      VideoSettings* resolved) const override;
  std::vector<FieldViolation> CheckPrompts(const std::string& prompt,
                                           const std::string& negative_prompt) const override;

 private:
  WanCard(std::string name, WanConfig config, const RequestedSettings& defaults,
          const WanLimits& limits);

  std::string name_;
  WanConfig config_;
  RequestedSettings defaults_;
  WanLimits limits_;
};

// The defaults of the family that `config` belongs to; every field is set but seed and, with one
// expert, guidance_scale_2.
RequestedSettings WanFamilyDefaults(const WanConfig& config);

// Reads the repository's configurations and its optional dlo.json. Errors as ReadWanConfig.
absl::StatusOr<std::unique_ptr<ModelCard>> ReadWanCard(const std::filesystem::path& root,
                                                       const WanLimits& limits = {});

// The scheduler that `settings` ask for: the repository's with the request's solver and flow_shift.
// INVALID_ARGUMENT for a solver that does not exist.
absl::StatusOr<FlowSchedulerConfig> ResolveScheduler(const FlowSchedulerConfig& repository,
                                                     const VideoSettings& settings);

}  // namespace dlo
