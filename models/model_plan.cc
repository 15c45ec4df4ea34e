#include "models/model_plan.h"

#include "base/status_macros.h"
#include "models/wan/wan_card.h"
#include "models/wan/wan_plan.h"
#include "models/wan/wan_work.h"

namespace dlo {
namespace {

// The only family there is.
absl::StatusOr<const WanCard*> AsWan(const ModelCard& card) {
  const auto* wan = dynamic_cast<const WanCard*>(&card);
  if (wan == nullptr) return absl::UnimplementedError("this model has no visit plan");
  return wan;
}

}  // namespace

absl::StatusOr<VisitPlan> VisitPlanOf(const ModelCard& card, const VideoSettings& settings) {
  ASSIGN_OR_RETURN(const WanCard* wan, AsWan(card));
  return WanVisitPlan(wan->config(), settings);
}

absl::StatusOr<RequestWork> WorkOf(const ModelCard& card, DType dtype,
                                   const RequestToPlan& request) {
  ASSIGN_OR_RETURN(const WanCard* wan, AsWan(card));
  return WanWork(wan->config(), dtype, request);
}

}  // namespace dlo
