// Which rank is where, who belongs together, and which settings may be combined.
//
//   ASSIGN_OR_RETURN(Topology topology, Topology::Create({.dp = 2, .ulysses = 2}));
//   RankCoordinates at = topology.Coordinates(Rank{3});              // dp 1, ulysses 1
//   std::vector<Rank> sp = topology.Group(GroupKind::kSp, Rank{3});  // 2, 3
//   RETURN_IF_ERROR(CheckCombination(parallel, settings));
//
// Ranks are numbered with tp fastest: rank = tp + TP * (sp + SP * (cfg + CFG * dp)), and within sp
// ulysses fastest: sp = ulysses + ULYSSES * ring. A replica is the ranks that work on one request;
// replica d owns the ranks [d * R, (d + 1) * R), and its first rank, the primary, answers.
//
// Values, immutable after construction, so thread-safe. No degree is ever derived from a count of
// devices.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/quantization.h"

namespace dlo {

// Of the whole world, unlike the rank of a Communicator, which counts within its group.
struct Rank {
  int value = 0;
  auto operator<=>(const Rank&) const = default;
};

struct Replica {
  int value = 0;
  auto operator<=>(const Replica&) const = default;
};

// Degrees; 1 means that the axis is not used. hsdp_shard multiplies nothing: it splits the ranks of
// a replica into shard groups.
struct ParallelConfig {
  int dp = 1;       // replicas, each working on a request of its own
  int tp = 1;       // ranks that split every matrix
  int ulysses = 1;  // ranks that exchange heads for sequence
  int ring = 1;     // ranks around which keys and values travel
  int cfg = 1;      // ranks that share the branches of guidance
  int hsdp_shard = 1;

  int64_t sp() const { return int64_t{ulysses} * ring; }
};

struct RankCoordinates {
  int dp = 0;
  int cfg = 0;
  int ring = 0;
  int ulysses = 0;
  int tp = 0;
  bool operator==(const RankCoordinates&) const = default;
};

enum class GroupKind { kWorld, kReplica, kTp, kUlysses, kRing, kSp, kCfg, kDp, kHsdp };
absl::string_view GroupKindName(GroupKind kind);

// How blocks reach the device.
enum class WeightTransfer {
  kNone,       // all of them stay there
  kAllGather,  // each rank of the weight group holds 1/g of a block in host memory
  kRankLocal   // each rank reads whole blocks from host memory
};
absl::string_view WeightTransferName(WeightTransfer transfer);  // as in the configuration
absl::StatusOr<WeightTransfer> ParseWeightTransfer(absl::string_view name);

class Topology {
 public:
  static constexpr int kWorldSizeMax = 4096;

  // INVALID_ARGUMENT naming each degree below 1, a world beyond kWorldSizeMax, or an hsdp_shard
  // that does not divide a replica.
  static absl::StatusOr<Topology> Create(const ParallelConfig& config);

  const ParallelConfig& config() const { return config_; }
  int world_size() const { return ranks_per_replica() * config_.dp; }
  int ranks_per_replica() const {
    return config_.tp * config_.ulysses * config_.ring * config_.cfg;
  }

  // Ranks, replicas and coordinates given to these must lie within the topology.
  RankCoordinates Coordinates(Rank rank) const;
  Rank At(const RankCoordinates& at) const;
  Replica ReplicaOf(Rank rank) const { return Replica{rank.value / ranks_per_replica()}; }
  Rank Primary(Replica replica) const { return Rank{replica.value * ranks_per_replica()}; }
  bool IsPrimary(Rank rank) const { return Primary(ReplicaOf(rank)) == rank; }

  // The group of that kind to which `rank` belongs, ascending; the index in it is the rank in the
  // group's communicator. Ulysses ranks of one tp rank follow each other, ring ranks are ULYSSES
  // apart (times TP).
  std::vector<Rank> Group(GroupKind kind, Rank rank) const;

  // All groups of a kind, ordered by their first rank. They partition the world.
  std::vector<std::vector<Rank>> Groups(GroupKind kind) const;

  // The ranks that hold one copy of the streamed weights together: kDp if dp > 1, else kSp if
  // sp > 1, else none. Never TP, whose ranks hold different weights. None without AllGather.
  std::optional<GroupKind> WeightGroup(WeightTransfer transfer) const;

  // kAllGather without a weight group has nothing to gather and is kRankLocal.
  WeightTransfer EffectiveTransfer(WeightTransfer transfer) const;

  // The replicas that must move together, because weight collectives join them: all if the weight
  // group spans DP, else each on its own.
  std::vector<std::vector<Replica>> DispatchDomains(WeightTransfer transfer) const;

 private:
  explicit Topology(const ParallelConfig& config) : config_(config) {}

  bool SameGroup(GroupKind kind, Rank a, Rank b) const;

  ParallelConfig config_;
};

// As many resident layers as fit.
inline constexpr int kResidentLayersAuto = -1;

// Whether an optional source of weights is used: not at all, where it can be (else the ordinary
// loader), or by all means (else starting fails).
enum class SourceMode { kOff, kPreferred, kRequired };

// What is combined with a ParallelConfig.
struct CombinationSettings {
  WeightTransfer transfer = WeightTransfer::kNone;
  int resident_layers = 0;  // or kResidentLayersAuto
  OnlineQuantization quantization = OnlineQuantization::kNone;
  SourceMode checkpoint_mmap = SourceMode::kOff;
  SourceMode host_weight_runtime = SourceMode::kOff;

  // Facts about the model; zero where not known, which skips the rules that need them.
  int attention_heads = 0;
  int blocks = 0;
  int guidance_branches = 0;
  bool resident_path = true;  // the model declares which leading blocks may stay on the device

  // Processes that a launcher started; zero where dlo-serve starts them itself.
  int launched_ranks = 0;
};

// Whether these settings may be combined, now or once every engine is there. INVALID_ARGUMENT with
// one line for each rule that is broken; a line names the settings with their values and the way
// out.
absl::Status CheckCombination(const ParallelConfig& config, const CombinationSettings& settings);

// UNIMPLEMENTED, one line for each degree above 1 whose engine does not exist yet: all but dp.
absl::Status CheckAvailable(const ParallelConfig& config);

}  // namespace dlo
