// Where a model's files lie: `model.path` of the configuration is a folder or a Hugging Face id.
//
//   ASSIGN_OR_RETURN(std::filesystem::path root,
//                    ResolveModelPath("Wan-AI/Wan2.1-T2V-1.3B-Diffusers"));
//
// An existing folder is returned as it is. Otherwise `org/name` or `org/name@revision` (a branch,
// tag or commit; default "main") resolves to its snapshot in the local Hugging Face cache:
// $HF_HUB_CACHE, else $HUGGINGFACE_HUB_CACHE, else $HF_HOME/hub, else
// $XDG_CACHE_HOME/huggingface/hub, else ~/.cache/huggingface/hub (the rules of huggingface_hub).
// Nothing is downloaded.
//
// Errors: NOT_FOUND names the places looked at and the command that fetches the model;
// INVALID_ARGUMENT for a file where a folder is expected, or for text that is neither a folder nor
// an id. Stateless; may be called from any thread.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace dlo {

// Looks up an environment variable.
using EnvironmentLookup = std::function<std::optional<std::string>(const char* name)>;

absl::StatusOr<std::filesystem::path> ResolveModelPath(const std::string& folder_or_hub_id);
absl::StatusOr<std::filesystem::path> ResolveModelPath(const std::string& folder_or_hub_id,
                                                       const EnvironmentLookup& environment);

}  // namespace dlo
