// What a Wan request asks of the weights. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "base/quantization.h"
#include "models/model_card.h"
#include "models/wan/wan_config.h"
#include "offload/visit_plan.h"

namespace dlo {

// Rings of a Wan pipeline, in the order of the stages.
enum WanRing { kWanTextRing = 0, kWanTransformerRing = 1, kWanTransformer2Ring = 2 };

// Which transformer runs at a timestep: 0, or 1 for the low-noise expert below the boundary.
int WanExpertAt(const WanConfig& config, float timestep);

// The text encoder once for the prompt and, with guidance, once for the negative prompt; then for
// each step the expert that runs at it. All branches of guidance share a pass. The leading
// `resident_blocks` of each transformer are no visits. Errors as ResolveScheduler.
absl::StatusOr<VisitPlan> WanVisitPlan(const WanConfig& config, const VideoSettings& settings,
                                       int64_t resident_blocks = 0);

// An upper estimate of what one block's forward takes on the device beside its weights: for each of
// the G branches and L tokens the hidden state, its norm, queries, keys, values, attention and two
// sums, each `dim` wide, or the feed-forward's inner layer, in the run dtype; the request's text
// keys and values of all blocks; and of quantised weights the largest, brought back.
int64_t WanActivationBytes(const WanConfig& config, const VideoSettings& settings, DType dtype,
                           OnlineQuantization quantization = OnlineQuantization::kNone);

}  // namespace dlo
