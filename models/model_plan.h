// What a request asks of a model's weights and of the machine, whatever the family. Torch-free.
//
//   ASSIGN_OR_RETURN(VisitPlan plan, VisitPlanOf(*card, settings));
//   ASSIGN_OR_RETURN(RequestWork work, WorkOf(*card, DType::kBF16, {settings, "a red circle"}));
//
// Stateless; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "base/quantization.h"
#include "models/model_card.h"
#include "offload/block_layout.h"
#include "offload/visit_plan.h"

namespace dlo {

// For settings that the card resolved. UNIMPLEMENTED for a card that is not ReadModelCard's.
absl::StatusOr<VisitPlan> VisitPlanOf(const ModelCard& card, const VideoSettings& settings);

struct RequestToPlan {
  VideoSettings settings;  // resolved
  std::string prompt;
  std::string negative_prompt;
  int64_t resident_blocks = 0;  // leading ones of each transformer, which are not streamed
  OnlineQuantization quantization = OnlineQuantization::kNone;  // of the model
};

struct RequestWork {
  struct Ring {
    std::string component;  // the repository's folder
    BlockLayout block;      // each of its blocks
  };
  VisitPlan plan;
  std::vector<Ring> rings;  // as in the plan
  // Floating-point operations of each stage, roughly.
  double text_flops = 0;
  double denoise_flops = 0;
  double decode_flops = 0;
};

// With weights of `dtype`. Errors as VisitPlanOf.
absl::StatusOr<RequestWork> WorkOf(const ModelCard& card, DType dtype,
                                   const RequestToPlan& request);

}  // namespace dlo
