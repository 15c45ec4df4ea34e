#include "server/rank_placement.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace dlo {
namespace {

// More cores than any list of a sane system names.
constexpr int kCoreMax = 1 << 16;

std::string FirstLine(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

std::vector<int> UsableCores() {
  std::vector<int> cores;
  cpu_set_t* const set = CPU_ALLOC(kCoreMax);
  const size_t bytes = CPU_ALLOC_SIZE(kCoreMax);
  if (sched_getaffinity(0, bytes, set) == 0) {
    for (int core = 0; core < kCoreMax; ++core) {
      if (CPU_ISSET_S(core, bytes, set)) cores.push_back(core);
    }
  }
  CPU_FREE(set);
  if (cores.empty()) cores.push_back(0);
  return cores;
}

}  // namespace

int HostCores::count() const {
  size_t count = 0;
  for (const std::vector<int>& node : nodes) count += node.size();
  return static_cast<int>(count);
}

std::vector<int> ParseCoreList(const std::string& list) {
  std::vector<int> cores;
  for (absl::string_view range : absl::StrSplit(list, ',', absl::SkipWhitespace())) {
    const std::pair<absl::string_view, absl::string_view> ends =
        absl::StrSplit(range, absl::MaxSplits('-', 1));
    int first = 0;
    if (!absl::SimpleAtoi(ends.first, &first)) continue;
    int last = first;
    if (!ends.second.empty() && !absl::SimpleAtoi(ends.second, &last)) continue;
    for (int core = std::max(first, 0); core <= std::min(last, kCoreMax - 1); ++core) {
      cores.push_back(core);
    }
  }
  return cores;
}

HostCores ReadHostCores(const std::filesystem::path& sysfs_nodes) {
  const std::vector<int> usable = UsableCores();
  std::set<int> left(usable.begin(), usable.end());
  HostCores host;
  for (int node : ParseCoreList(FirstLine(sysfs_nodes / "online"))) {
    std::vector<int> cores;
    for (int core :
         ParseCoreList(FirstLine(sysfs_nodes / absl::StrCat("node", node) / "cpulist"))) {
      if (left.erase(core) > 0) cores.push_back(core);
    }
    if (!cores.empty()) host.nodes.push_back(std::move(cores));
  }
  if (host.nodes.empty() || !left.empty()) host.nodes = {usable};
  return host;
}

absl::StatusOr<std::vector<RankPlacement>> PlaceRanks(const PlacementOptions& options,
                                                      const HostCores& host) {
  const int ranks = options.num_ranks;
  std::vector<RankPlacement> placement(ranks);
  std::vector<std::string> devices;
  if (options.visible_devices) {
    devices = absl::StrSplit(*options.visible_devices, ',', absl::SkipWhitespace());
    if (options.cuda && static_cast<int>(devices.size()) < ranks) {
      return absl::InvalidArgumentError(
          absl::StrCat("CUDA_VISIBLE_DEVICES is \"", *options.visible_devices, "\", which names ",
                       devices.size(), " devices, but there are ", ranks,
                       " ranks, one device each; name more devices or lower parallel.dp"));
    }
  }
  const int nodes = static_cast<int>(host.nodes.size());
  const bool bind = nodes > 1 && !options.cuda;
  const auto node_of = [&](int rank) { return static_cast<int>(int64_t{rank} * nodes / ranks); };
  std::vector<int> ranks_on(nodes, 0);
  for (int rank = 0; rank < ranks; ++rank) ++ranks_on[node_of(rank)];
  for (int rank = 0; rank < ranks; ++rank) {
    RankPlacement& place = placement[rank];
    const int node = node_of(rank);
    // A rank alone has all of the host.
    if (bind && ranks > 1) place.cores = host.nodes[node];
    if (options.threads > 0) {
      place.threads = options.threads;
    } else if (ranks > 1 && !options.threads_set) {
      const int share =
          bind ? static_cast<int>(host.nodes[node].size()) / ranks_on[node] : host.count() / ranks;
      place.threads = std::max(1, share);
    }
    if (options.cuda && ranks > 1) {
      place.environment.push_back(absl::StrCat(
          "CUDA_VISIBLE_DEVICES=", devices.empty() ? absl::StrCat(rank) : devices[rank]));
    }
  }
  return placement;
}

}  // namespace dlo
