// What a request asks of a model's weights, whatever the family. Torch-free.
//
//   ASSIGN_OR_RETURN(VisitPlan plan, VisitPlanOf(*card, settings));
//
// Stateless; any thread.
#pragma once

#include "absl/status/statusor.h"
#include "models/model_card.h"
#include "offload/visit_plan.h"

namespace dlo {

// For settings that the card resolved. UNIMPLEMENTED for a card that is not ReadModelCard's.
absl::StatusOr<VisitPlan> VisitPlanOf(const ModelCard& card, const VideoSettings& settings);

}  // namespace dlo
