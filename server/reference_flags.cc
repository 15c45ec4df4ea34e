#include "server/reference_flags.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace dlo {
namespace {

constexpr char kDistributed[] = "--enable-distributed-layerwise-offload";
constexpr char kUseAllGather[] = "--dlo-use-allgather";
constexpr char kNoUseAllGather[] = "--dlo-no-use-allgather";
constexpr char kResidentLayers[] = "--dlo-resident-layers";
constexpr char kRuntimeMode[] = "--host-weight-runtime-mode";
constexpr char kRuntimeRoot[] = "--host-weight-runtime-root";
constexpr char kCpuOffload[] = "--enable-cpu-offload";
constexpr char kLayerwiseOffload[] = "--enable-layerwise-offload";

constexpr char kTransfer[] = "--transfer";
constexpr char kOwnResidentLayers[] = "--resident-layers";
constexpr char kOwnMode[] = "--host-weights-mode";
constexpr char kOwnRoot[] = "--host-weights-root";

absl::Status Conflict(const std::string& reference, const std::string& own) {
  return absl::InvalidArgumentError(
      absl::StrCat(reference, " and ", own, " say different things; give one of them"));
}

}  // namespace

std::vector<std::string> ReferenceFlags::Names() {
  return {kDistributed, kUseAllGather, kNoUseAllGather, kResidentLayers,
          kRuntimeMode, kRuntimeRoot,  kCpuOffload,     kLayerwiseOffload};
}

void ReferenceFlags::AddTo(CLI::App& app) {
  constexpr char kGroup[] = "Flags of the reference system";
  app.add_flag(kDistributed, distributed_, "as --transfer allgather")->group(kGroup);
  app.add_flag(kUseAllGather, use_allgather_, absl::StrCat("with ", kDistributed, ": its default"))
      ->group(kGroup);
  app.add_flag(kNoUseAllGather, no_use_allgather_,
               absl::StrCat("with ", kDistributed, ": --transfer rank-local"))
      ->group(kGroup);
  app.add_option(kResidentLayers, resident_layers_, "as --resident-layers")
      ->type_name("N")
      ->group(kGroup);
  app.add_option(kRuntimeMode, runtime_mode_, absl::StrCat("as ", kOwnMode))
      ->type_name("MODE")
      ->group(kGroup);
  app.add_option(kRuntimeRoot, runtime_root_, absl::StrCat("as ", kOwnRoot))
      ->type_name("FOLDER")
      ->group(kGroup);
  app.add_flag(kCpuOffload, cpu_offload_, "superseded, without effect")->group(kGroup);
  app.add_flag(kLayerwiseOffload, layerwise_offload_, "superseded, without effect")->group(kGroup);
}

absl::StatusOr<ReferenceFlags::MappedFlags> ReferenceFlags::Map(
    const std::map<std::string, std::string>& own) const {
  MappedFlags mapped;
  if (use_allgather_ && no_use_allgather_) return Conflict(kUseAllGather, kNoUseAllGather);
  const std::string path = use_allgather_ ? kUseAllGather : kNoUseAllGather;
  const bool path_given = use_allgather_ || no_use_allgather_;
  const auto transfer = own.find(kTransfer);
  const std::string wanted = no_use_allgather_ ? "rank-local" : "allgather";
  if (transfer != own.end()) {
    const std::string given = absl::StrCat(kTransfer, " ", transfer->second);
    if (path_given && transfer->second != wanted) return Conflict(path, given);
    if (distributed_ && transfer->second == "none") return Conflict(kDistributed, given);
  } else if (distributed_) {
    mapped.values[kTransfer] = wanted;
    mapped.as_written[kTransfer] =
        path_given ? absl::StrCat(kDistributed, " ", path) : kDistributed;
  } else if (path_given) {
    return absl::InvalidArgumentError(absl::StrCat(path, " does nothing without ", kDistributed,
                                                   "; add it, or use ", kTransfer, " ", wanted));
  }
  struct Renamed {
    const char* reference;
    const char* own;
    const std::string& value;
  };
  for (const Renamed& flag : {Renamed{kResidentLayers, kOwnResidentLayers, resident_layers_},
                              Renamed{kRuntimeMode, kOwnMode, runtime_mode_},
                              Renamed{kRuntimeRoot, kOwnRoot, runtime_root_}}) {
    if (flag.value.empty()) continue;
    const auto given = own.find(flag.own);
    if (given != own.end() && given->second != flag.value) {
      return Conflict(absl::StrCat(flag.reference, " ", flag.value),
                      absl::StrCat(flag.own, " ", given->second));
    }
    mapped.values[flag.own] = flag.value;
    mapped.as_written[flag.own] = flag.reference;
  }
  return mapped;
}

std::vector<std::string> ReferenceFlags::Notices(bool streams) const {
  std::vector<std::string> notices;
  const auto add = [&](const char* flag) {
    notices.push_back(
        streams ? absl::StrCat(flag,
                               " is superseded by distributed layerwise offload, which has "
                               "priority, and does nothing")
                : absl::StrCat(flag,
                               " is superseded and does nothing; use --transfer rank-local "
                               "(or ",
                               kDistributed, ") to keep blocks in host memory"));
  };
  if (cpu_offload_) add(kCpuOffload);
  if (layerwise_offload_) add(kLayerwiseOffload);
  return notices;
}

}  // namespace dlo
