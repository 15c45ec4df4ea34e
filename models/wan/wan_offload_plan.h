// The components of a Wan model, what of them may stream, and when each is needed. Torch-free.
#pragma once

#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/quantization.h"
#include "models/wan/wan_config.h"
#include "offload/offload_plan.h"

namespace dlo {

// The folders of the repository that hold weights.
std::vector<std::string> WanComponentNames(const WanConfig& config);

// Text encoder and transformers in `dtype`, the VAE's decoder in its own; `quantization` is of the
// transformers. Rings are WanRing's.
OffloadPlan WanOffloadPlan(const WanConfig& config, DType dtype,
                           OnlineQuantization quantization = OnlineQuantization::kNone);

}  // namespace dlo
