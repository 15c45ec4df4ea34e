// The communicators of one worker process, found through a store that a rank of its dispatch
// domain serves.
//
//   ASSIGN_OR_RETURN(RankCommunicators groups,
//                    JoinRankGroups({.rank = 1, .parallel = {.dp = 4},
//                                    .transfer = WeightTransfer::kAllGather,
//                                    .rendezvous = "127.0.0.1:40123"}));
//
// Collective over the ranks of the dispatch domain. Once it has returned everywhere the store is of
// no more use.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/flight_recorder.h"
#include "base/topology.h"
#include "runtime/communicator.h"
#include "runtime/device.h"

namespace dlo {

struct RankGroupOptions {
  int rank = 0;
  ParallelConfig parallel;
  WeightTransfer transfer = WeightTransfer::kNone;
  DeviceKind device = DeviceKind::kCpu;
  // One of both: a listening socket to serve the store on, or the address where another rank does.
  int rendezvous_fd = -1;
  std::string rendezvous;                // IP:PORT
  std::string local_host = "127.0.0.1";  // an address of this machine that the peers can reach
  GroupTimeouts timeouts;
  // Where the groups note their operations; outlives them. Null: nowhere.
  FlightRecorder* recorder = nullptr;
};

// Nothing to join, and so an empty answer, where no group has two ranks. Errors as TcpStore's and
// CommunicatorFactory::Create's.
absl::StatusOr<RankCommunicators> JoinRankGroups(const RankGroupOptions& options);

}  // namespace dlo
