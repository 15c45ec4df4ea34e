#include "offload/offload_plan.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "offload/block_layout.h"

namespace dlo {
namespace {

absl::Status Refuse(const std::string& component, const std::string& what) {
  return absl::InvalidArgumentError(
      absl::StrCat("offload plan, component \"", component, "\": ", what));
}

// Blocks 0, 1, ... without a gap; each tensor once.
absl::Status CheckSpecs(const OffloadComponent& component) {
  std::set<std::string> names;
  std::set<int> blocks;
  for (const TensorSpec& spec : component.specs) {
    if (!names.insert(spec.name).second) {
      return Refuse(component.name, absl::StrCat("tensor ", spec.name, " is named twice"));
    }
    if (spec.block >= 0) blocks.insert(spec.block);
  }
  if (!blocks.empty() && *blocks.rbegin() + 1 != static_cast<int>(blocks.size())) {
    return Refuse(component.name, absl::StrCat("its blocks are ", absl::StrJoin(blocks, ", "),
                                               "; they must be 0, 1, ... without a gap"));
  }
  if (component.ring && blocks.empty()) {
    return Refuse(component.name,
                  absl::StrCat("has no blocks to stream as ring ", *component.ring));
  }
  return absl::OkStatus();
}

// Of the component's blocks by number, and of what lies outside them by -1.
std::map<int, int64_t> BytesByBlock(const OffloadComponent& component) {
  std::map<int, std::vector<TensorSpec>> specs;
  for (const TensorSpec& spec : component.specs) specs[spec.block].push_back(spec);
  std::map<int, int64_t> bytes;
  for (const auto& [block, tensors] : specs) bytes[block] = BlockLayout::Of(tensors).total_bytes();
  return bytes;
}

}  // namespace

absl::StatusOr<int64_t> FitResidentBlocks(const OffloadPlan& plan, int64_t activation_bytes,
                                          int slots, int64_t limit_bytes) {
  if (limit_bytes <= 0) {
    return absl::InvalidArgumentError(
        "offload.resident_layers is auto, but there is no offload.device_memory_limit to fit; set "
        "it, or a number of layers");
  }
  int64_t largest = 0, outside = 0, num_blocks = 0;
  for (const OffloadComponent& component : plan.components) {
    if (!component.ring) continue;
    const bool denoises = component.stage == ComponentStage::kDenoise;
    for (const auto& [block, bytes] : BytesByBlock(component)) {
      if (block >= 0) {
        largest = std::max(largest, bytes);
        if (denoises) num_blocks = std::max<int64_t>(num_blocks, block + 1);
      } else if (denoises) {
        outside = std::max(outside, bytes);
      }
    }
  }
  const int64_t others = slots * largest + outside + activation_bytes;
  if (others > limit_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("offload.device_memory_limit is ", limit_bytes, " bytes, but ", slots,
                     " slots, the weights beside them and the default request's activations need ",
                     others, "; raise it, or use fewer slots"));
  }
  const int64_t fit = std::min(num_blocks, (limit_bytes - others) / std::max<int64_t>(1, largest));
  spdlog::info("offload.resident_layers auto: {} of {} blocks fit into {} bytes", fit, num_blocks,
               limit_bytes);
  return fit;
}

absl::Status CheckOffloadPlan(const OffloadPlan& plan, const std::vector<std::string>& components) {
  std::set<std::string> names;
  std::set<int> rings;
  for (const OffloadComponent& component : plan.components) {
    if (!names.insert(component.name).second) return Refuse(component.name, "is named twice");
    if (std::find(components.begin(), components.end(), component.name) == components.end()) {
      return Refuse(component.name, absl::StrCat("is not of the model, which has ",
                                                 absl::StrJoin(components, ", ")));
    }
    if (component.ring && !rings.insert(*component.ring).second) {
      return Refuse(component.name,
                    absl::StrCat("ring ", *component.ring, " is another component's too"));
    }
    RETURN_IF_ERROR(CheckSpecs(component));
  }
  for (const std::string& component : components) {
    if (names.count(component) == 0) {
      return Refuse(component, "has no lifecycle: the plan must say when it is on the device");
    }
  }
  if (!rings.empty() &&
      (*rings.begin() != 0 || *rings.rbegin() + 1 != static_cast<int>(rings.size()))) {
    return absl::InvalidArgumentError(absl::StrCat("offload plan: its rings are ",
                                                   absl::StrJoin(rings, ", "),
                                                   "; they must be 0, 1, ... without a gap"));
  }
  return absl::OkStatus();
}

}  // namespace dlo
