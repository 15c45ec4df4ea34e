// One denoising step after another: from the transformer's velocity to the next, less noisy
// latents.
//
//   std::unique_ptr<FlowSolver> solver = MakeFlowSolver(config, /*num_steps=*/50);
//   for (float timestep : solver->schedule().timesteps) {
//     latents = solver->Step(Velocity(latents, timestep), latents);
//   }
//
// A solver serves one request and belongs to one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "models/schedulers/flow_schedule.h"
#include "models/wan/wan_config.h"

namespace dlo {

class FlowSolver {
 public:
  virtual ~FlowSolver() = default;

  const FlowSchedule& schedule() const { return schedule_; }

  // velocity in the run dtype, latents of the same shape -> the latents of the next noise level.
  // UniPC returns float32, Euler (as diffusers does) the velocity's dtype. To be called once for
  // each step, in order.
  virtual at::Tensor Step(const at::Tensor& velocity, const at::Tensor& latents) = 0;

 protected:
  explicit FlowSolver(FlowSchedule schedule) : schedule_(std::move(schedule)) {}
  FlowSchedule schedule_;
};

std::unique_ptr<FlowSolver> MakeFlowSolver(const FlowSchedulerConfig& config, int num_steps);

}  // namespace dlo
