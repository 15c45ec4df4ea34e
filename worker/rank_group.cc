#include "worker/rank_group.h"

#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "runtime/cpu/gloo_communicator.h"
#include "runtime/cuda/nccl_communicator.h"

namespace dlo {
namespace {

constexpr char kPrefix[] = "dlo";

absl::StatusOr<std::unique_ptr<TcpStore>> OpenStore(const RankGroupOptions& options) {
  if (options.rendezvous_fd >= 0) return TcpStore::Serve({.listen_fd = options.rendezvous_fd});
  const size_t colon = options.rendezvous.rfind(':');
  int port = 0;
  if (colon == std::string::npos ||
      !absl::SimpleAtoi(options.rendezvous.substr(colon + 1), &port)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--rendezvous is \"", options.rendezvous, "\", not IP:PORT"));
  }
  return TcpStore::Connect(options.rendezvous.substr(0, colon), port, options.timeouts.setup);
}

}  // namespace

absl::StatusOr<RankCommunicators> JoinRankGroups(const RankGroupOptions& options) {
  ASSIGN_OR_RETURN(const Topology topology, Topology::Create(options.parallel));
  if (!topology.WeightGroup(options.transfer).has_value() && topology.ranks_per_replica() == 1) {
    return RankCommunicators();
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<TcpStore> store, OpenStore(options));
  std::unique_ptr<CommunicatorFactory> factory;
  if (options.device == DeviceKind::kCuda) {
    ASSIGN_OR_RETURN(factory, OpenNcclFactory(*store, {.device = 0, .prefix = kPrefix}));
  } else {
    factory = MakeGlooFactory(*store, kPrefix, options.local_host);
  }
  ASSIGN_OR_RETURN(RankCommunicators groups,
                   CreateRankCommunicators(topology, Rank{options.rank}, options.transfer,
                                           options.timeouts, *factory, options.recorder));
  // The store must not go while a rank still connects.
  for (Communicator* group : {groups.weights.get(), groups.replica.get()}) {
    if (group != nullptr) RETURN_IF_ERROR(group->Barrier());
  }
  return groups;
}

}  // namespace dlo
