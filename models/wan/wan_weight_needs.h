// What each component of a Wan repository needs of its checkpoint. Torch-free.
//
//   for (const ComponentNeeds& needs : WanWeightNeeds(config, DType::kBF16)) Load(needs.specs);
//
// Pure; any thread.
#pragma once

#include <vector>

#include "base/dtype.h"
#include "base/quantization.h"
#include "loader/host_weight_plan.h"
#include "models/wan/wan_config.h"

namespace dlo {

// The components of WanOffloadPlan, in its order, with the token table that no device needs.
// `dtype` and `quantization` are the run's.
std::vector<ComponentNeeds> WanWeightNeeds(
    const WanConfig& config, DType dtype,
    OnlineQuantization quantization = OnlineQuantization::kNone);

}  // namespace dlo
