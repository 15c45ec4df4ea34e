#include "models/wan/wan_plan.h"

#include <algorithm>

#include "base/status_macros.h"
#include "models/schedulers/flow_schedule.h"
#include "models/wan/wan_card.h"

namespace dlo {

int WanExpertAt(const WanConfig& config, float timestep) {
  if (!config.transformer_2 || !config.boundary_ratio) return 0;
  return timestep >= *config.boundary_ratio * config.scheduler.num_train_timesteps ? 0 : 1;
}

absl::StatusOr<VisitPlan> WanVisitPlan(const WanConfig& config, const VideoSettings& settings,
                                       int64_t resident_blocks) {
  ASSIGN_OR_RETURN(const FlowSchedulerConfig scheduler,
                   ResolveScheduler(config.scheduler, settings));
  const auto streamed = [&](const WanTransformerConfig& transformer) {
    return std::max<int64_t>(0, transformer.num_layers - resident_blocks);
  };
  std::vector<int64_t> rings = {config.text_encoder.num_layers, streamed(config.transformer)};
  if (config.transformer_2) rings.push_back(streamed(*config.transformer_2));
  VisitPlan plan(std::move(rings));
  plan.Add(kWanTextRing, settings.guidance_scale > 1 ? 2 : 1);
  const FlowSchedule schedule = MakeFlowSchedule(
      scheduler.grid, scheduler.shift, settings.num_inference_steps, scheduler.num_train_timesteps);
  for (float timestep : schedule.timesteps) {
    plan.Add(kWanTransformerRing + WanExpertAt(config, timestep), 1);
  }
  return plan;
}

int64_t WanActivationBytes(const WanConfig& config, const VideoSettings& settings, DType dtype,
                           OnlineQuantization quantization) {
  const WanTransformerConfig& transformer = config.transformer;
  const int64_t dim = transformer.hidden_size();
  const auto [pt, ph, pw] = transformer.patch_size;
  const int64_t tokens = ((settings.num_frames - 1) / config.vae.scale_factor_temporal + 1) / pt *
                         (settings.height / config.vae.scale_factor_spatial / ph) *
                         (settings.width / config.vae.scale_factor_spatial / pw);
  const int64_t branches = settings.guidance_scale > 1 ? 2 : 1;
  constexpr int64_t kTextRows = 512;
  const int64_t text = 2 * kTextRows * dim * transformer.num_layers;
  const int64_t weight =
      quantization == OnlineQuantization::kNone ? 0 : dim * std::max(dim, transformer.ffn_dim);
  return (branches * (tokens * (8 * dim + transformer.ffn_dim) + text) + weight) *
         DTypeBytes(dtype);
}

}  // namespace dlo
