#include "models/model_plan.h"

#include "models/wan/wan_card.h"
#include "models/wan/wan_plan.h"

namespace dlo {

absl::StatusOr<VisitPlan> VisitPlanOf(const ModelCard& card, const VideoSettings& settings) {
  // The only family there is.
  const auto* wan = dynamic_cast<const WanCard*>(&card);
  if (wan == nullptr) return absl::UnimplementedError("this model has no visit plan");
  return WanVisitPlan(wan->config(), settings);
}

}  // namespace dlo
