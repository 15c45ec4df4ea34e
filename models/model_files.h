// Checks a model repository without loading it: what a start would stumble over. Torch-free.
//
//   ASSIGN_OR_RETURN(std::vector<std::string> lines, CheckModelFiles(root, DType::kBF16));
//
// Stateless; safe from any thread. Reads configurations, tokenizer and the headers of all weight
// files, not the weights themselves.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "base/quantization.h"
#include "loader/host_weight_plan.h"

namespace dlo {

// One line for each component of the repository at `root` that is in order, e.g. "transformer: 225
// tensors in 1 file, 8.7 MB in memory" (as `dtype` and `quantization` say); with `streaming` one
// more for each streamed component, with where the host's copy of its blocks will be and why.
// Errors as ReadModelCard, T5Tokenizer::Load, Checkpoint::Open, CheckTensors and
// CheckHostWeightPlan, for the first component that is not.
absl::StatusOr<std::vector<std::string>> CheckModelFiles(
    const std::filesystem::path& root, DType dtype,
    const std::optional<HostWeightSettings>& streaming = std::nullopt,
    OnlineQuantization quantization = OnlineQuantization::kNone);

}  // namespace dlo
