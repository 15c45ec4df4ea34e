// Where the workers of this host run: how many threads compute, on which cores, on which device.
//
//   ASSIGN_OR_RETURN(std::vector<RankPlacement> placement,
//                    PlaceRanks({.num_ranks = 4}, ReadHostCores()));
//
// Ranks share the cores evenly. On a host with several NUMA nodes each rank stays on the cores of
// one node, so that Linux gives it that node's memory; consecutive ranks share a node. Stateless;
// any thread.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace dlo {

// The cores that this process may use, by NUMA node; no node is empty.
struct HostCores {
  std::vector<std::vector<int>> nodes;

  int count() const;
};

// By the process's affinity and `sysfs_nodes`; one node where the system names none.
HostCores ReadHostCores(const std::filesystem::path& sysfs_nodes = "/sys/devices/system/node");

// The numbers in a list as in sysfs, "0-3,8": {0, 1, 2, 3, 8}. What is no number is skipped.
std::vector<int> ParseCoreList(const std::string& list);

struct PlacementOptions {
  int num_ranks = 1;
  int threads = 0;           // of each rank; 0: an even share of the cores
  bool threads_set = false;  // by OMP_NUM_THREADS, which a `threads` of 0 then leaves alone
  bool cuda = false;
  std::optional<std::string> visible_devices;  // CUDA_VISIBLE_DEVICES of this process
};

struct RankPlacement {
  int threads = 0;                       // 0: torch's own choice
  std::vector<int> cores;                // empty: any
  std::vector<std::string> environment;  // "NAME=value", beside what every worker gets
};

// One entry a rank. With CUDA and several ranks each one sees a device of its own, the next of
// those that are visible here, and is not bound to cores, since only the driver knows which are
// near it. INVALID_ARGUMENT when fewer devices are visible than there are ranks.
absl::StatusOr<std::vector<RankPlacement>> PlaceRanks(const PlacementOptions& options,
                                                      const HostCores& host);

}  // namespace dlo
