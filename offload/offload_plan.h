// What a model declares about its components: which may stream, and when each is on the device.
//
//   OffloadPlan plan = {
//       {{.name = "text_encoder", .specs = text, .ring = 0, .stage = Stage::kText},
//        {.name = "transformer", .specs = dit, .ring = 1, .stage = Stage::kDenoise},
//        {.name = "vae", .specs = vae, .stage = Stage::kDecode}}};
//   RETURN_IF_ERROR(CheckOffloadPlan(plan, {"text_encoder", "transformer", "vae"}));
//
// A component with a ring streams its blocks (the specs with a block number); the rest of it, and
// all of a component without one, is brought to the device for its stage and leaves it afterwards.
// Values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/tensor_spec.h"

namespace dlo {

enum class ComponentStage { kText, kDenoise, kDecode };

struct OffloadComponent {
  std::string name;  // its folder in the repository
  std::vector<TensorSpec> specs;
  std::optional<int> ring;  // in a VisitPlan, of its blocks
  ComponentStage stage = ComponentStage::kDenoise;
};

struct OffloadPlan {
  std::vector<OffloadComponent> components;
};

// How many leading blocks of each denoising component fit on a device of `limit_bytes` beside
// `slots` slots for the largest block, the weights outside the blocks, and `activation_bytes`; at
// most all. INVALID_ARGUMENT without a limit (0), RESOURCE_EXHAUSTED if the others alone do not
// fit.
absl::StatusOr<int64_t> FitResidentBlocks(const OffloadPlan& plan, int64_t activation_bytes,
                                          int slots, int64_t limit_bytes);

// INVALID_ARGUMENT, naming component and tensor, for a plan that names a component, a tensor or a
// ring twice, leaves a gap between blocks or rings, gives a ring to a component without blocks,
// names a component that the model does not have, or leaves one of the model's out.
absl::Status CheckOffloadPlan(const OffloadPlan& plan, const std::vector<std::string>& components);

}  // namespace dlo
