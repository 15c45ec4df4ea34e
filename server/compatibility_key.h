// Which requests may share a wave, as a text: equal keys may.
//
//   ASSIGN_OR_RETURN(std::string key,
//                    CompatibilityKey(spec.settings, spec.output_format, extras));
//
// Ranks that gather each other's weights must ask for the same blocks in the same order. The key
// holds more than that order depends on, after every default has been applied: what a client left
// out and what it spelled out compare equal. Prompt, negative prompt and seed are no part of it, as
// nothing they say changes what is asked of the weights: whether guidance runs follows from its
// scale alone. Stateless; any thread.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dlo/v1/video_generation.pb.h"
#include "models/model_card.h"
#include "nlohmann/json.hpp"

namespace dlo {

enum class WaveCompatibility {
  kStrict,   // by CompatibilityKey: the members of a wave take the same time
  kSchedule  // by their visit plans' digests alone: shapes may differ, so more requests find
             // company, and the fast ones wait for the slowest
};

// Canonical JSON of all settings but the seed, the output format and the model's extra parameters.
// INVALID_ARGUMENT if a value has no JSON: a number that is not finite, a text that is not UTF-8.
absl::StatusOr<std::string> CompatibilityKey(const VideoSettings& settings,
                                             v1::OutputFormat output_format,
                                             const nlohmann::json& extras);

// The fields in which two keys differ: those of CompatibilityKey, or "schedule" for keys that are
// visit plans' digests.
std::vector<std::string> DifferingFields(const std::string& a, const std::string& b);

// All that DifferingFields may name.
const std::vector<std::string>& CompatibilityFields();

}  // namespace dlo
