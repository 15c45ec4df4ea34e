#include "loader/host_weight_plan.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "loader/cast.h"
#include "loader/messages.h"

namespace dlo {
namespace {

// Why a component cannot be mapped.
struct Refused {
  PlanRefusal refusal = PlanRefusal::kNone;
  std::string reason;
};

Refused Accepted() { return {}; }

Refused FromOffenders(PlanRefusal refusal, const Offenders& offenders, absl::string_view what) {
  return offenders.empty() ? Accepted()
                           : Refused{refusal, absl::StrCat(what, ", ", offenders.Text())};
}

// What rules mapping out whatever the files hold.
Refused JudgeSettings(const HostWeightSettings& settings) {
  if (settings.mmap == CheckpointMmap::kOff) {
    return {PlanRefusal::kTurnedOff, "host_weights.checkpoint_mmap is off"};
  }
  if (settings.canonical) {
    return {PlanRefusal::kCanonical,
            "host_weights.mode asks for an artifact, which is made of weights in private memory"};
  }
  if (settings.tp != 1) {
    return {PlanRefusal::kTensorParallel,
            absl::StrCat("a checkpoint is not cut for tensor parallelism (parallel.tp is ",
                         settings.tp, ")")};
  }
  if (settings.hsdp) {
    return {PlanRefusal::kHsdp, "HSDP shards the weights in its own way"};
  }
  if (settings.rotated_int8) {
    return {PlanRefusal::kRotatedInt8, "INT8 weights are rotated while they are loaded"};
  }
  if (settings.adapted) {
    return {PlanRefusal::kAdapted, "a LoRA is merged into the weights while they are loaded"};
  }
  return Accepted();
}

Refused JudgeFolder(const ComponentNeeds& component, absl::Span<const ComponentNeeds> needs) {
  if (component.folder.empty()) {
    return {PlanRefusal::kNoFolder, "its weights have no folder of their own"};
  }
  for (const ComponentNeeds& other : needs) {
    if (&other != &component && other.folder == component.folder) {
      return {PlanRefusal::kSharedFolder,
              absl::StrCat("its folder ", component.folder, " also holds ", other.name)};
    }
  }
  return Accepted();
}

// The names of a folder's tensors. A name that stands in two files has two sources.
class SourceIndex {
 public:
  explicit SourceIndex(const WeightSource& source) {
    for (const SourceTensor& tensor : source.tensors) by_key_[tensor.key].push_back(&tensor);
  }

  // Every tensor that `spec` could be made from.
  std::vector<const SourceTensor*> For(const TensorSpec& spec) const {
    std::vector<const SourceTensor*> found;
    const auto add = [&](const std::string& name) {
      const auto it = by_key_.find(name);
      if (it != by_key_.end()) found.insert(found.end(), it->second.begin(), it->second.end());
    };
    add(spec.name);
    for (const std::string& alias : spec.aliases) {
      if (alias != spec.name) add(alias);
    }
    return found;
  }

 private:
  std::map<absl::string_view, std::vector<const SourceTensor*>> by_key_;
};

// One source for each spec, one spec for each source.
Refused MatchNames(const ComponentNeeds& component, const WeightSource& source,
                   std::vector<const SourceTensor*>* matches) {
  const SourceIndex index(source);
  Offenders repeated, doubled, missing, unexpected;
  std::set<absl::string_view> names, claimed;
  for (const TensorSpec& spec : component.specs) {
    if (!names.insert(spec.name).second) repeated.Add(QuoteForMessage(spec.name));
    const std::vector<const SourceTensor*> found = index.For(spec);
    matches->push_back(found.empty() ? nullptr : found.front());
    if (found.empty()) missing.Add(QuoteForMessage(spec.name));
    if (found.size() > 1) {
      doubled.Add(absl::StrCat(QuoteForMessage(spec.name), " as ", QuoteForMessage(found[0]->key),
                               " and ", QuoteForMessage(found[1]->key)));
    }
    for (const SourceTensor* tensor : found) claimed.insert(tensor->key);
  }
  for (const SourceTensor& tensor : source.tensors) {
    const bool ignored =
        std::any_of(component.ignore_unexpected.begin(), component.ignore_unexpected.end(),
                    [&](const std::string& part) { return absl::StrContains(tensor.key, part); });
    if (!ignored && claimed.count(tensor.key) == 0) unexpected.Add(QuoteForMessage(tensor.key));
  }
  for (Refused refused :
       {FromOffenders(PlanRefusal::kRepeated, repeated, "tensors are asked for twice"),
        FromOffenders(PlanRefusal::kDoubled, doubled, "tensors have two sources"),
        FromOffenders(PlanRefusal::kMissing, missing, "tensors are missing"),
        FromOffenders(PlanRefusal::kUnexpected, unexpected, "tensors are not the model's")}) {
    if (refused.refusal != PlanRefusal::kNone) return refused;
  }
  return Accepted();
}

// Whether the runs give each byte of the needed tensor exactly once, from within the source.
bool Covers(std::vector<ByteRun> runs, int64_t needed_bytes, int64_t source_bytes) {
  std::sort(runs.begin(), runs.end(),
            [](const ByteRun& a, const ByteRun& b) { return a.destination < b.destination; });
  int64_t next = 0;
  for (const ByteRun& run : runs) {
    if (run.destination != next || run.bytes <= 0 || run.source < 0 ||
        run.source > source_bytes - run.bytes) {
      return false;
    }
    next += run.bytes;
  }
  return next == needed_bytes;
}

// The bindings of matched tensors, if their bytes are the needed ones or can become so.
Refused BindTensors(const ComponentNeeds& component, const WeightSource& source,
                    const std::vector<const SourceTensor*>& matches, ComponentPlan* plan) {
  Offenders custom, outside, shape, dtype, adaptation;
  std::set<int> files;
  for (size_t i = 0; i < component.specs.size(); ++i) {
    const TensorSpec& spec = component.specs[i];
    const SourceTensor& tensor = *matches[i];
    const bool file_known =
        tensor.file >= 0 && static_cast<size_t>(tensor.file) < source.files.size();
    const WeightSource::File file =
        file_known ? source.files[tensor.file] : WeightSource::File{"(no file)", 0};
    const std::string where = absl::StrCat(QuoteForMessage(tensor.key), " in ", file.path);
    if (tensor.offset < 0 || tensor.bytes < 0 || tensor.offset > file.bytes - tensor.bytes) {
      outside.Add(where);
      continue;
    }
    WeightBinding binding = {.name = spec.name,
                             .block = spec.block,
                             .file = file.path,
                             .key = tensor.key,
                             .offset = tensor.offset,
                             .bytes = tensor.bytes,
                             .adaptation = std::nullopt};
    // What lies outside the blocks is loaded as usual, so that a cast is no obstacle.
    const bool streamed = spec.block >= 0;
    const bool own_way = streamed && std::find(component.custom.begin(), component.custom.end(),
                                               spec.name) != component.custom.end();
    const bool same_shape = tensor.shape == spec.shape;
    const bool same_dtype =
        streamed ? tensor.dtype == spec.dtype : CanCast(tensor.dtype, spec.dtype);
    const std::string key = QuoteForMessage(tensor.key);
    if (own_way || !same_shape || !same_dtype) {
      if (streamed && component.adapter != nullptr) {
        binding.adaptation = component.adapter->Adapt(spec, tensor);
      }
      if (!binding.adaptation) {
        if (own_way) {
          custom.Add(key);
        } else if (!same_shape) {
          shape.Add(absl::StrCat(key, " is ", ShapeText(tensor.shape), " instead of ",
                                 ShapeText(spec.shape)));
        } else {
          dtype.Add(absl::StrCat(key, " is ", DTypeName(tensor.dtype), ", the run's ",
                                 DTypeName(spec.dtype)));
        }
        continue;
      }
      const bool cast_once = binding.adaptation->runs.empty();
      if (cast_once ? !same_shape || !CanCast(tensor.dtype, spec.dtype)
                    : !Covers(binding.adaptation->runs, spec.bytes(), tensor.bytes)) {
        adaptation.Add(absl::StrCat(key, " by ", binding.adaptation->adapter));
        continue;
      }
    }
    if (streamed) {
      const bool cast_once = binding.adaptation && binding.adaptation->runs.empty();
      (cast_once ? plan->cast_bytes : plan->mapped_bytes) += spec.bytes();
      if (!cast_once) files.insert(tensor.file);
    }
    plan->bindings.push_back(std::move(binding));
  }
  plan->num_files = static_cast<int>(files.size());
  for (Refused refused :
       {FromOffenders(PlanRefusal::kCustom, custom,
                      "no adapter says how tensors that the model loads in its own way are made"),
        FromOffenders(PlanRefusal::kOutsideFile, outside, "tensors reach beyond their file"),
        FromOffenders(PlanRefusal::kShape, shape, "tensors have another shape"),
        FromOffenders(PlanRefusal::kDType, dtype, "tensors have another dtype"),
        FromOffenders(PlanRefusal::kBadAdaptation, adaptation,
                      "an adapter does not give every byte of a tensor once")}) {
    if (refused.refusal != PlanRefusal::kNone) return refused;
  }
  return Accepted();
}

Refused JudgeComponent(const ComponentNeeds& component, absl::Span<const ComponentNeeds> needs,
                       absl::Span<const WeightSource> sources, const HostWeightSettings& settings,
                       ComponentPlan* plan) {
  if (Refused refused = JudgeSettings(settings); refused.refusal != PlanRefusal::kNone) {
    return refused;
  }
  if (std::any_of(component.specs.begin(), component.specs.end(),
                  [](const TensorSpec& spec) { return !spec.scale.empty(); })) {
    return {PlanRefusal::kOnlineQuantization, "weights are quantised while they are loaded"};
  }
  if (Refused refused = JudgeFolder(component, needs); refused.refusal != PlanRefusal::kNone) {
    return refused;
  }
  const auto source = std::find_if(sources.begin(), sources.end(), [&](const WeightSource& s) {
    return s.folder == component.folder;
  });
  if (source == sources.end()) {
    return {PlanRefusal::kNoSource,
            absl::StrCat("nothing is known of its folder ", component.folder)};
  }
  if (!source->status.ok()) {
    return {PlanRefusal::kUnreadable,
            absl::StrCat("its files cannot be read: ", source->status.message())};
  }
  if (source->tensors.empty()) {
    return {PlanRefusal::kEmptySource, absl::StrCat(component.folder, " holds no tensors")};
  }
  if (std::none_of(component.specs.begin(), component.specs.end(),
                   [](const TensorSpec& spec) { return spec.block >= 0; })) {
    return {PlanRefusal::kNothingStreamed, "it has no blocks"};
  }
  std::vector<const SourceTensor*> matches;
  if (Refused refused = MatchNames(component, *source, &matches);
      refused.refusal != PlanRefusal::kNone) {
    return refused;
  }
  return BindTensors(component, *source, matches, plan);
}

}  // namespace

absl::StatusOr<CheckpointMmap> ParseCheckpointMmap(absl::string_view name) {
  for (CheckpointMmap mmap : {CheckpointMmap::kAuto, CheckpointMmap::kOn, CheckpointMmap::kOff}) {
    if (name == CheckpointMmapName(mmap)) return mmap;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", name, "\" is not one of \"auto\", \"on\", \"off\""));
}

absl::string_view CheckpointMmapName(CheckpointMmap mmap) {
  switch (mmap) {
    case CheckpointMmap::kAuto:
      return "auto";
    case CheckpointMmap::kOn:
      return "on";
    case CheckpointMmap::kOff:
      return "off";
  }
  return "";
}

absl::string_view PlanRefusalName(PlanRefusal refusal) {
  switch (refusal) {
    case PlanRefusal::kNone:
      return "none";
    case PlanRefusal::kTurnedOff:
      return "off";
    case PlanRefusal::kCanonical:
      return "canonical";
    case PlanRefusal::kTensorParallel:
      return "tensor-parallel";
    case PlanRefusal::kHsdp:
      return "hsdp";
    case PlanRefusal::kOnlineQuantization:
      return "online-quantization";
    case PlanRefusal::kRotatedInt8:
      return "rotated-int8";
    case PlanRefusal::kAdapted:
      return "lora";
    case PlanRefusal::kNoFolder:
      return "no-folder";
    case PlanRefusal::kSharedFolder:
      return "shared-folder";
    case PlanRefusal::kNoSource:
      return "no-source";
    case PlanRefusal::kUnreadable:
      return "unreadable";
    case PlanRefusal::kEmptySource:
      return "empty";
    case PlanRefusal::kNothingStreamed:
      return "no-blocks";
    case PlanRefusal::kRepeated:
      return "repeated";
    case PlanRefusal::kDoubled:
      return "doubled";
    case PlanRefusal::kMissing:
      return "missing";
    case PlanRefusal::kUnexpected:
      return "unexpected";
    case PlanRefusal::kCustom:
      return "custom";
    case PlanRefusal::kOutsideFile:
      return "outside-file";
    case PlanRefusal::kShape:
      return "shape";
    case PlanRefusal::kDType:
      return "dtype";
    case PlanRefusal::kBadAdaptation:
      return "adapter";
  }
  return "";
}

std::string ComponentPlan::Text() const {
  if (!mapped()) {
    return absl::StrCat(name, ": blocks in private memory (", PlanRefusalName(refusal),
                        "): ", reason);
  }
  return absl::StrFormat("%s: blocks in the pages of %d file%s, %.1f MB%s", name, num_files,
                         num_files == 1 ? "" : "s", static_cast<double>(mapped_bytes) / 1e6,
                         cast_bytes == 0 ? ""
                                         : absl::StrFormat(", %.1f MB cast into private memory",
                                                           static_cast<double>(cast_bytes) / 1e6));
}

const ComponentPlan* HostWeightPlan::Find(absl::string_view name) const {
  for (const ComponentPlan& component : components) {
    if (component.name == name) return &component;
  }
  return nullptr;
}

WeightSource DescribeSource(std::string folder, const Checkpoint& checkpoint) {
  WeightSource source;
  source.folder = std::move(folder);
  for (const SafetensorsFile& file : checkpoint.files()) {
    const int index = static_cast<int>(source.files.size());
    source.files.push_back({file.path().native(), file.size_bytes()});
    for (const auto& [key, entry] : file.tensors()) {
      source.tensors.push_back({.key = key,
                                .file = index,
                                .dtype = entry.dtype,
                                .shape = entry.shape,
                                .offset = entry.offset,
                                .bytes = entry.bytes});
    }
  }
  return source;
}

HostWeightPlan PlanHostWeights(absl::Span<const ComponentNeeds> needs,
                               absl::Span<const WeightSource> sources,
                               const HostWeightSettings& settings) {
  HostWeightPlan plan;
  for (const ComponentNeeds& component : needs) {
    if (!component.streamed) continue;
    ComponentPlan decided;
    Refused refused = JudgeComponent(component, needs, sources, settings, &decided);
    if (refused.refusal != PlanRefusal::kNone) decided = ComponentPlan();
    decided.name = component.name;
    decided.refusal = refused.refusal;
    decided.reason = std::move(refused.reason);
    plan.components.push_back(std::move(decided));
  }
  return plan;
}

void LogHostWeightPlan(const HostWeightPlan& plan) {
  for (const ComponentPlan& component : plan.components) {
    spdlog::info("host weights of {}", component.Text());
  }
}

absl::Status CheckHostWeightPlan(const HostWeightPlan& plan, const HostWeightSettings& settings) {
  if (settings.mmap != CheckpointMmap::kOn) return absl::OkStatus();
  std::vector<std::string> refused;
  for (const ComponentPlan& component : plan.components) {
    if (!component.mapped()) {
      refused.push_back(absl::StrCat(component.name, ": ", component.reason));
    }
  }
  if (refused.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("host_weights.checkpoint_mmap is on, but the checkpoint cannot stand for the "
                   "host's weights; set it to auto to keep them in private memory: ",
                   absl::StrJoin(refused, "; ")));
}

}  // namespace dlo
