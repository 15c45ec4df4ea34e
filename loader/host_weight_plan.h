// Where the host's copy of each component's streamed weights comes from, decided before anything is
// loaded: the checkpoint's own pages, or private memory and why.
//
//   HostWeightPlan plan = PlanHostWeights(needs, sources, {.mmap = CheckpointMmap::kAuto});
//   RETURN_IF_ERROR(CheckHostWeightPlan(plan, settings));
//   LogHostWeightPlan(plan);
//
// A component is mapped if every tensor that it needs has exactly one source in a folder of its
// own, every tensor in that folder is needed, and the bytes of its streamed tensors are the run's
// already, or an adapter says how they become so; none of them is quantised. Else the whole
// component is loaded as usual: what half of it could do is of no use. Components are decided one
// by one.
//
// Pure, but for logging: reads neither files nor environment, mutates nothing; any thread. The plan
// is computed once and handed on. Follows the preflight of
// ../shared/reference/host-weight-runtime-and-loader.md, section 6.2, in its order.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/tensor_spec.h"
#include "loader/checkpoint.h"
#include "loader/checkpoint_adapter.h"

namespace dlo {

// Whether streamed weights may be read from the checkpoint's mapping: if possible, always (else it
// is an error), or never.
enum class CheckpointMmap : uint8_t { kAuto, kOn, kOff };

// INVALID_ARGUMENT unless `name` is "auto", "on" or "off".
absl::StatusOr<CheckpointMmap> ParseCheckpointMmap(absl::string_view name);
absl::string_view CheckpointMmapName(CheckpointMmap mmap);

struct HostWeightSettings {
  CheckpointMmap mmap = CheckpointMmap::kAuto;
  bool canonical = false;  // the Host Weight Runtime wants finished weights in private memory
  int tp = 1;
  bool hsdp = false;
  bool rotated_int8 = false;  // INT8 weights that are rotated while they are loaded
  bool adapted = false;       // a LoRA is merged into the weights while they are loaded
};

// What a model needs of one component.
struct ComponentNeeds {
  std::string name;       // "transformer"
  std::string folder;     // of the repository, this component's alone
  bool streamed = false;  // its blocks are; else it is loaded as usual and not planned
  // Those of a block are streamed; those outside are copied to the device once, cast on the way.
  std::vector<TensorSpec> specs;
  std::vector<std::string> ignore_unexpected;  // as in LoadOptions
  std::vector<std::string> custom;             // names of specs that the model loads in its own way
  std::shared_ptr<const CheckpointAdapter> adapter;  // null: none
};

// What the headers of a folder's weight files say.
struct WeightSource {
  struct File {
    std::string path;
    int64_t bytes = 0;
  };
  std::string folder;
  absl::Status status;  // not OK: why they cannot be read
  std::vector<File> files;
  std::vector<SourceTensor> tensors;
};

WeightSource DescribeSource(std::string folder, const Checkpoint& checkpoint);

enum class PlanRefusal : uint8_t {
  kNone,
  kTurnedOff,
  kCanonical,
  kTensorParallel,
  kHsdp,
  kOnlineQuantization,
  kRotatedInt8,
  kAdapted,
  kNoFolder,
  kSharedFolder,
  kNoSource,
  kUnreadable,
  kEmptySource,
  kNothingStreamed,
  kRepeated,
  kDoubled,
  kMissing,
  kUnexpected,
  kCustom,
  kOutsideFile,
  kShape,
  kDType,
  kBadAdaptation,
};

// A short word for the log and for labels of metrics: "tensor-parallel", "dtype", ...
absl::string_view PlanRefusalName(PlanRefusal refusal);

// Where one needed tensor comes from.
struct WeightBinding {
  std::string name;  // the spec's
  int block = -1;    // the spec's; -1: read once by the ordinary loader, which may cast it
  std::string file;
  std::string key;  // in the file
  int64_t offset = 0;
  int64_t bytes = 0;  // from the file's start, as stored
  std::optional<Adaptation> adaptation;
};

struct ComponentPlan {
  std::string name;
  PlanRefusal refusal = PlanRefusal::kNone;
  std::string reason;  // of the refusal
  // Mapped: one for each needed tensor, in the order of the specs.
  std::vector<WeightBinding> bindings;
  int64_t mapped_bytes = 0;  // read from pages, again and again
  int64_t cast_bytes = 0;    // of streamed tensors that are cast once into private memory
  int num_files = 0;         // that the mapped bytes lie in

  bool mapped() const { return refusal == PlanRefusal::kNone; }
  // "transformer: blocks in the pages of 2 files, 2.6 GB", or "transformer: blocks in private
  // memory (dtype): ..."
  std::string Text() const;
};

struct HostWeightPlan {
  std::vector<ComponentPlan> components;  // the streamed ones, in the order of the needs

  const ComponentPlan* Find(absl::string_view name) const;  // null: not streamed
};

HostWeightPlan PlanHostWeights(absl::Span<const ComponentNeeds> needs,
                               absl::Span<const WeightSource> sources,
                               const HostWeightSettings& settings);

// One line for each component.
void LogHostWeightPlan(const HostWeightPlan& plan);

// FAILED_PRECONDITION with each reason if the checkpoint must be mapped (kOn) and a component is
// refused.
absl::Status CheckHostWeightPlan(const HostWeightPlan& plan, const HostWeightSettings& settings);

}  // namespace dlo
