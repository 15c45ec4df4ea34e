#include "models/wan/wan_plan.h"

#include "base/status_macros.h"
#include "models/schedulers/flow_schedule.h"
#include "models/wan/wan_card.h"

namespace dlo {

int WanExpertAt(const WanConfig& config, float timestep) {
  if (!config.transformer_2 || !config.boundary_ratio) return 0;
  return timestep >= *config.boundary_ratio * config.scheduler.num_train_timesteps ? 0 : 1;
}

absl::StatusOr<VisitPlan> WanVisitPlan(const WanConfig& config, const VideoSettings& settings) {
  ASSIGN_OR_RETURN(const FlowSchedulerConfig scheduler,
                   ResolveScheduler(config.scheduler, settings));
  std::vector<int64_t> rings = {config.text_encoder.num_layers, config.transformer.num_layers};
  if (config.transformer_2) rings.push_back(config.transformer_2->num_layers);
  VisitPlan plan(std::move(rings));
  plan.Add(kWanTextRing, settings.guidance_scale > 1 ? 2 : 1);
  const FlowSchedule schedule = MakeFlowSchedule(
      scheduler.grid, scheduler.shift, settings.num_inference_steps, scheduler.num_train_timesteps);
  for (float timestep : schedule.timesteps) {
    plan.Add(kWanTransformerRing + WanExpertAt(config, timestep), 1);
  }
  return plan;
}

}  // namespace dlo
