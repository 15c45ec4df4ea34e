// How much a Wan request asks of a machine, from its configuration alone: for forecasts, not for
// benchmarks. Torch-free.
//
//   ASSIGN_OR_RETURN(RequestWork work, WanWork(card.config(), DType::kBF16, request));
//
// Pure; any thread.
#pragma once

#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "models/model_plan.h"
#include "models/wan/wan_config.h"

namespace dlo {

// Counts two operations for each multiplication of matrices, attention and convolutions; norms,
// activations, the solver and the encoder of the file are left out. Tokens of a prompt are its
// bytes divided by four, as only the workers have a tokenizer. Errors as WanVisitPlan.
absl::StatusOr<RequestWork> WanWork(const WanConfig& config, DType dtype,
                                    const RequestToPlan& request);

}  // namespace dlo
