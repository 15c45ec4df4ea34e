// What the frontend knows of a model without loading it: defaults, limits, request checks.
// Torch-free.
//
//   ASSIGN_OR_RETURN(std::unique_ptr<ModelCard> card,
//                    ReadModelCard("/models/Wan2.1-T2V-1.3B-Diffusers"));
//   VideoSettings settings;
//   std::vector<FieldViolation> wrong = card->Resolve(requested, random_seed, &settings);
//
// A card is immutable and safe to use from any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace dlo {

// A request's settings as the client sent them: what is unset takes the model's default.
struct RequestedSettings {
  std::optional<int64_t> width;   // pixels
  std::optional<int64_t> height;  // pixels
  std::optional<int64_t> num_frames;
  std::optional<double> fps;
  std::optional<int64_t> num_inference_steps;
  std::optional<double> guidance_scale;
  std::optional<double> guidance_scale_2;
  std::optional<double> flow_shift;
  std::optional<std::string> solver;  // "unipc", "unipc-legacy", "euler", "euler-native"
  std::optional<uint64_t> seed;
};

// Every default applied, sizes and frame counts rounded as the model does; what a worker runs.
struct VideoSettings {
  int width = 0;   // pixels
  int height = 0;  // pixels
  int num_frames = 0;
  double fps = 0;
  int num_inference_steps = 0;
  double guidance_scale = 0;               // 1 or less: no guidance
  std::optional<double> guidance_scale_2;  // set exactly when the model has two experts
  double flow_shift = 0;
  std::string solver;
  uint64_t seed = 0;
};

// One wrong field of a request, as in google.rpc.BadRequest.
struct FieldViolation {
  std::string field;        // e.g. "settings.height"
  std::string description;  // what is wrong, the value, and the way out
};

class ModelCard {
 public:
  virtual ~ModelCard() = default;

  virtual const std::string& name() const = 0;  // e.g. the repository folder's name

  // Fills `resolved` and returns every wrong field (empty: the request can run). An unset seed is
  // drawn from `random_seed`.
  virtual std::vector<FieldViolation> Resolve(const RequestedSettings& requested,
                                              uint64_t random_seed,
                                              VideoSettings* resolved) const = 0;

  // Prompt limits, one violation per wrong field ("prompt", "negative_prompt").
  virtual std::vector<FieldViolation> CheckPrompts(const std::string& prompt,
                                                   const std::string& negative_prompt) const = 0;
};

// The card for the repository at `root`, by the pipeline class in its model_index.json. Errors as
// ReadWanConfig.
absl::StatusOr<std::unique_ptr<ModelCard>> ReadModelCard(const std::filesystem::path& root);

}  // namespace dlo
