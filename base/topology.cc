#include "base/topology.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace dlo {
namespace {

// Named as dlo-serve's user knows it: by its flag, where it has one of its own.
struct Degree {
  absl::string_view flag;
  int value;
  const char* engine;  // null: exists
};

// dlo-serve has one flag for both.
absl::string_view UlyssesFlag(const ParallelConfig& config) {
  return config.ring == 1 ? "--sp" : "--sp (ulysses)";
}

std::vector<Degree> DegreesOf(const ParallelConfig& config) {
  return {{"--dp", config.dp, nullptr},
          {"--tp", config.tp, "tensor parallelism"},
          {UlyssesFlag(config), config.ulysses, "sequence parallelism"},
          {"--sp (ring)", config.ring, "sequence parallelism"},
          {"--cfg", config.cfg, "guidance parallelism"},
          {"HSDP shard size", config.hsdp_shard, "HSDP"}};
}

std::string Shown(absl::string_view flag, int value) { return absl::StrCat(flag, " ", value); }

// The degrees whose product a rank count is.
std::string ShownProduct(const ParallelConfig& config) {
  return absl::StrCat("--dp ", config.dp, " x --tp ", config.tp, " x --sp ", config.sp(),
                      " x --cfg ", config.cfg);
}

// Negative beyond kWorldSizeMax. Exact for any degrees from 1 on.
int64_t WorldSize(const ParallelConfig& config) {
  int64_t size = 1;
  for (int degree : {config.dp, config.tp, config.ulysses, config.ring, config.cfg}) {
    size *= degree;
    if (size > Topology::kWorldSizeMax) return -1;
  }
  return size;
}

std::vector<std::string> DegreeProblems(const ParallelConfig& config) {
  std::vector<std::string> problems;
  for (const Degree& degree : DegreesOf(config)) {
    if (degree.value < 1) {
      problems.push_back(absl::StrCat(Shown(degree.flag, degree.value),
                                      ": a degree is at least 1; 1 switches it off"));
    }
  }
  if (!problems.empty()) return problems;
  const int64_t world = WorldSize(config);
  if (world < 0) {
    problems.push_back(absl::StrCat(ShownProduct(config), " asks for more than ",
                                    Topology::kWorldSizeMax, " ranks; lower one of them"));
    return problems;
  }
  const int64_t replica = world / config.dp;
  if (replica % config.hsdp_shard != 0) {
    problems.push_back(
        absl::StrCat(Shown("HSDP shard size", config.hsdp_shard), " does not divide the ", replica,
                     " ranks of a replica (", ShownProduct(config),
                     "); set it to a divisor of them, or give a replica more ranks with --sp"));
  }
  return problems;
}

struct Combination {
  const ParallelConfig& parallel;
  const CombinationSettings& settings;

  bool hsdp() const { return parallel.hsdp_shard > 1; }
  bool quantized() const { return settings.quantization != OnlineQuantization::kNone; }
  bool transfers(WeightTransfer transfer) const { return settings.transfer == transfer; }
  bool streams() const { return !transfers(WeightTransfer::kNone); }
  std::string transfer() const {
    return absl::StrCat("--transfer ", WeightTransferName(settings.transfer));
  }
  std::string shard() const { return Shown("HSDP shard size", parallel.hsdp_shard); }
  std::string resident() const {
    if (settings.resident_layers == kResidentLayersAuto) return "--resident-layers auto";
    return Shown("--resident-layers", settings.resident_layers);
  }
  std::string quantization() const {
    return absl::StrCat("online quantization ", OnlineQuantizationName(settings.quantization));
  }
};

// A mapping of the checkpoint serves only tensors that are used as the checkpoint has them.
constexpr char kMapped[] = "a required checkpoint mapping";
constexpr char kMappedWayOut[] = "make it preferred, which falls back to loading";

struct Rule {
  bool (*broken)(const Combination&);
  std::string (*refusal)(const Combination&);
};

// All that may not be combined. Each row stands alone: it reads nothing but the settings, so that
// the order of rows decides only the order of lines.
constexpr Rule kRules[] = {
    {[](const Combination& c) { return c.hsdp() && c.transfers(WeightTransfer::kAllGather); },
     [](const Combination& c) {
       return absl::StrCat(c.shard(), " with ", c.transfer(),
                           ": HSDP has sharded the weights already, AllGather would shard them a "
                           "second time; use --transfer rank-local, or HSDP shard size 1");
     }},
    {[](const Combination& c) { return c.hsdp() && c.parallel.dp > 1; },
     [](const Combination& c) {
       return absl::StrCat(
           c.shard(), " with ", Shown("--dp", c.parallel.dp),
           ": HSDP shards within one replica only; use --dp 1, or HSDP shard size 1");
     }},
    {[](const Combination& c) { return c.hsdp() && c.parallel.tp > 1; },
     [](const Combination& c) {
       return absl::StrCat(
           c.shard(), " with ", Shown("--tp", c.parallel.tp),
           ": tensor parallelism has split the weights already; use --tp 1, or HSDP "
           "shard size 1");
     }},
    {[](const Combination& c) {
       return c.settings.resident_layers != 0 && c.transfers(WeightTransfer::kAllGather);
     },
     [](const Combination& c) {
       return absl::StrCat(c.resident(), " with ", c.transfer(),
                           ": leading blocks stay on the device only where each rank streams on "
                           "its own; use --transfer rank-local, or --resident-layers 0");
     }},
    {[](const Combination& c) { return c.settings.resident_layers != 0 && !c.streams(); },
     [](const Combination& c) {
       return absl::StrCat(c.resident(), " with ", c.transfer(),
                           ": without streaming all blocks are on the device; use "
                           "--resident-layers 0, or --transfer rank-local");
     }},
    {[](const Combination& c) { return c.settings.resident_layers < kResidentLayersAuto; },
     [](const Combination& c) {
       return absl::StrCat(c.resident(),
                           ": a number of blocks is at least 0; use "
                           "--resident-layers 0 to keep none");
     }},
    {[](const Combination& c) {
       return c.settings.resident_layers != 0 && !c.settings.resident_path;
     },
     [](const Combination& c) {
       return absl::StrCat(c.resident(),
                           " with a model that declares no blocks which may stay on the device; "
                           "use --resident-layers 0");
     }},
    {[](const Combination& c) {
       return c.settings.blocks > 0 && c.settings.resident_layers > c.settings.blocks;
     },
     [](const Combination& c) {
       return absl::StrCat(c.resident(), " with a model of ", c.settings.blocks,
                           " blocks; use at most that many, or --transfer none to keep them all");
     }},
    {[](const Combination& c) {
       return c.settings.quantization == OnlineQuantization::kOther &&
              c.transfers(WeightTransfer::kAllGather);
     },
     [](const Combination& c) {
       return absl::StrCat(c.quantization(), " with ", c.transfer(),
                           ": only per-tensor fp8 has a layout that is known to survive sharding; "
                           "use --transfer rank-local, fp8, or no online quantization");
     }},
    {[](const Combination& c) {
       return c.settings.checkpoint_mmap == SourceMode::kRequired && c.parallel.tp > 1;
     },
     [](const Combination& c) {
       return absl::StrCat(kMapped, " with ", Shown("--tp", c.parallel.tp),
                           ": a rank needs parts of tensors, which the loader cuts; ",
                           kMappedWayOut, ", or --tp 1");
     }},
    {[](const Combination& c) {
       return c.settings.checkpoint_mmap == SourceMode::kRequired && c.hsdp();
     },
     [](const Combination& c) {
       return absl::StrCat(kMapped, " with ", c.shard(),
                           ": HSDP keeps its own shards of the tensors; ", kMappedWayOut,
                           ", or HSDP shard size 1");
     }},
    {[](const Combination& c) {
       return c.settings.checkpoint_mmap == SourceMode::kRequired && c.quantized();
     },
     [](const Combination& c) {
       return absl::StrCat(kMapped, " with ", c.quantization(),
                           ": the weights that run are not those of the checkpoint; ",
                           kMappedWayOut, ", or no online quantization");
     }},
    {[](const Combination& c) {
       return c.settings.host_weight_runtime == SourceMode::kRequired &&
              !c.transfers(WeightTransfer::kRankLocal);
     },
     [](const Combination& c) {
       return absl::StrCat("a required host weight runtime with ", c.transfer(),
                           ": its artifacts hold whole blocks, which only rank-local streaming "
                           "reads; use --transfer rank-local, or make it preferred");
     }},
    {[](const Combination& c) {
       return c.settings.host_weight_runtime == SourceMode::kRequired && c.hsdp();
     },
     [](const Combination& c) {
       return absl::StrCat("a required host weight runtime with ", c.shard(),
                           ": it keeps no artifacts of HSDP's shards; make it preferred, or use "
                           "HSDP shard size 1");
     }},
    {[](const Combination& c) {
       return c.settings.host_weight_runtime == SourceMode::kRequired && c.quantized();
     },
     [](const Combination& c) {
       return absl::StrCat("a required host weight runtime with ", c.quantization(),
                           ": it keeps no artifacts of weights that were quantized at the start; "
                           "make it preferred, or use no online quantization");
     }},
    {[](const Combination& c) {
       return c.settings.attention_heads > 0 && c.settings.attention_heads % c.parallel.tp != 0;
     },
     [](const Combination& c) {
       return absl::StrCat(Shown("--tp", c.parallel.tp), " does not divide the model's ",
                           c.settings.attention_heads,
                           " attention heads; use a divisor of them, or --sp");
     }},
    {[](const Combination& c) {
       const int heads = c.settings.attention_heads;
       return heads > 0 && heads % c.parallel.tp == 0 &&
              (heads / c.parallel.tp) % c.parallel.ulysses != 0;
     },
     [](const Combination& c) {
       return absl::StrCat(
           Shown(UlyssesFlag(c.parallel), c.parallel.ulysses), " with ",
           Shown("--tp", c.parallel.tp), " does not divide the ",
           c.settings.attention_heads / c.parallel.tp,
           " attention heads of a rank; use a divisor of them, or a ring for the rest");
     }},
    {[](const Combination& c) {
       return c.settings.guidance_branches > 0 && c.parallel.cfg > c.settings.guidance_branches;
     },
     [](const Combination& c) {
       return absl::StrCat(Shown("--cfg", c.parallel.cfg), " with a model of ",
                           c.settings.guidance_branches,
                           " guidance branches would leave ranks without work; use at most that "
                           "many, or --dp");
     }},
    {[](const Combination& c) {
       return c.settings.launched_ranks != 0 && c.settings.launched_ranks != WorldSize(c.parallel);
     },
     [](const Combination& c) {
       return absl::StrCat(ShownProduct(c.parallel), " needs ", WorldSize(c.parallel),
                           " ranks, but ", c.settings.launched_ranks,
                           " were started; start as many, or change a degree (none is derived)");
     }},
};

absl::Status Refuse(const std::vector<std::string>& problems) {
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(problems, "\n"));
}

}  // namespace

absl::string_view GroupKindName(GroupKind kind) {
  switch (kind) {
    case GroupKind::kWorld:
      return "world";
    case GroupKind::kReplica:
      return "replica";
    case GroupKind::kTp:
      return "tp";
    case GroupKind::kUlysses:
      return "ulysses";
    case GroupKind::kRing:
      return "ring";
    case GroupKind::kSp:
      return "sp";
    case GroupKind::kCfg:
      return "cfg";
    case GroupKind::kDp:
      return "dp";
    case GroupKind::kHsdp:
      return "hsdp";
  }
  return "?";
}

absl::string_view WeightTransferName(WeightTransfer transfer) {
  switch (transfer) {
    case WeightTransfer::kNone:
      return "none";
    case WeightTransfer::kAllGather:
      return "allgather";
    case WeightTransfer::kRankLocal:
      return "rank-local";
  }
  return "?";
}

absl::StatusOr<WeightTransfer> ParseWeightTransfer(absl::string_view name) {
  for (WeightTransfer transfer :
       {WeightTransfer::kNone, WeightTransfer::kAllGather, WeightTransfer::kRankLocal}) {
    if (WeightTransferName(transfer) == name) return transfer;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("transfer is \"", name, "\"; known: none, allgather, rank-local"));
}

absl::StatusOr<Topology> Topology::Create(const ParallelConfig& config) {
  RETURN_IF_ERROR(Refuse(DegreeProblems(config)));
  return Topology(config);
}

RankCoordinates Topology::Coordinates(Rank rank) const {
  RankCoordinates at;
  int rest = rank.value;
  const auto next = [&rest](int degree) {
    const int digit = rest % degree;
    rest /= degree;
    return digit;
  };
  at.tp = next(config_.tp);
  at.ulysses = next(config_.ulysses);
  at.ring = next(config_.ring);
  at.cfg = next(config_.cfg);
  at.dp = rest;
  return at;
}

Rank Topology::At(const RankCoordinates& at) const {
  int rank = at.dp;
  rank = rank * config_.cfg + at.cfg;
  rank = rank * config_.ring + at.ring;
  rank = rank * config_.ulysses + at.ulysses;
  return Rank{rank * config_.tp + at.tp};
}

bool Topology::SameGroup(GroupKind kind, Rank a, Rank b) const {
  if (kind == GroupKind::kHsdp) {
    return a.value / config_.hsdp_shard == b.value / config_.hsdp_shard;
  }
  // The same group: the same coordinates but on the axes of that kind.
  RankCoordinates x = Coordinates(a);
  const RankCoordinates y = Coordinates(b);
  const bool all = kind == GroupKind::kWorld;
  const bool replica = all || kind == GroupKind::kReplica;
  if (all || kind == GroupKind::kDp) x.dp = y.dp;
  if (replica || kind == GroupKind::kTp) x.tp = y.tp;
  if (replica || kind == GroupKind::kCfg) x.cfg = y.cfg;
  if (replica || kind == GroupKind::kSp || kind == GroupKind::kUlysses) x.ulysses = y.ulysses;
  if (replica || kind == GroupKind::kSp || kind == GroupKind::kRing) x.ring = y.ring;
  return x == y;
}

std::vector<Rank> Topology::Group(GroupKind kind, Rank rank) const {
  std::vector<Rank> group;
  for (int other = 0; other < world_size(); ++other) {
    if (SameGroup(kind, rank, Rank{other})) group.push_back(Rank{other});
  }
  return group;
}

std::vector<std::vector<Rank>> Topology::Groups(GroupKind kind) const {
  std::vector<std::vector<Rank>> groups;
  for (int rank = 0; rank < world_size(); ++rank) {
    std::vector<Rank> group = Group(kind, Rank{rank});
    if (group.front() == Rank{rank}) groups.push_back(std::move(group));
  }
  return groups;
}

std::optional<GroupKind> Topology::WeightGroup(WeightTransfer transfer) const {
  if (transfer != WeightTransfer::kAllGather) return std::nullopt;
  if (config_.dp > 1) return GroupKind::kDp;
  if (config_.sp() > 1) return GroupKind::kSp;
  return std::nullopt;
}

WeightTransfer Topology::EffectiveTransfer(WeightTransfer transfer) const {
  if (transfer == WeightTransfer::kAllGather && !WeightGroup(transfer).has_value()) {
    return WeightTransfer::kRankLocal;
  }
  return transfer;
}

std::vector<std::vector<Replica>> Topology::DispatchDomains(WeightTransfer transfer) const {
  std::vector<std::vector<Replica>> domains;
  const bool together = WeightGroup(transfer) == GroupKind::kDp;
  for (int replica = 0; replica < config_.dp; ++replica) {
    if (domains.empty() || !together) domains.emplace_back();
    domains.back().push_back(Replica{replica});
  }
  return domains;
}

absl::Status CheckCombination(const ParallelConfig& config, const CombinationSettings& settings) {
  // The rules divide by degrees.
  RETURN_IF_ERROR(Refuse(DegreeProblems(config)));
  const Combination combination{config, settings};
  std::vector<std::string> problems;
  for (const Rule& rule : kRules) {
    if (rule.broken(combination)) problems.push_back(rule.refusal(combination));
  }
  return Refuse(problems);
}

absl::Status CheckAvailable(const ParallelConfig& config) {
  std::vector<std::string> problems;
  for (const Degree& degree : DegreesOf(config)) {
    if (degree.engine != nullptr && degree.value > 1) {
      problems.push_back(absl::StrCat(Shown(degree.flag, degree.value), ": ", degree.engine,
                                      " is not available yet; set it to 1"));
    }
  }
  if (problems.empty()) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrJoin(problems, "\n"));
}

}  // namespace dlo
