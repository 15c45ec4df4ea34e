// Noise levels of a flow-matching sampler. Torch-free.
//
//   FlowSchedule schedule =
//       MakeFlowSchedule(SigmaGrid::kUniPC, /*shift=*/3.0, /*num_steps=*/4, 1000);
//   // schedule.sigmas: 0.999999 0.900120 0.750375 0.500999 0, schedule.timesteps: 999 900 750 500
#pragma once

#include <vector>

#include "models/wan/wan_config.h"

namespace dlo {

struct FlowSchedule {
  std::vector<float> sigmas;  // num_steps + 1 values, falling, the last one 0
  std::vector<float>
      timesteps;  // num_steps values: what the transformer is told. Integers for the UniPC grids
};

// The schedule of `num_steps` (at least 1) steps; formulas in float64, rounded once. Source:
// diffusers 0.42 UniPCMultistepScheduler and FlowMatchEulerDiscreteScheduler, and for the legacy
// and native grids the original Wan repository. Timesteps repeat when there are many steps: index
// by step, never by timestep.
FlowSchedule MakeFlowSchedule(SigmaGrid grid, double shift, int num_steps, int num_train_timesteps);

}  // namespace dlo
