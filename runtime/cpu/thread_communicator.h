// Communicators whose ranks are threads of one process: the same operations, errors and deadlines
// as between processes, without libtorch, so that sanitizers see everything, and with faults on
// demand.
//
//   ThreadWorld world([](const GroupSpec& group, const CollectiveOp& op) {
//     return group.rank == 1 && op.sequence == 3 ? absl::InternalError("out of memory")
//                                                : absl::OkStatus();
//   });
//   // on each rank's thread
//   ASSIGN_OR_RETURN(auto communicator,
//                    world.factory().Create({.name = "dp", .rank = r, .size = 4}));
//
// A communicator that is destroyed is a rank that died. Thread-safe. The world outlives its
// communicators.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "runtime/communicator.h"

namespace dlo {

class ThreadWorld {
 public:
  // Called on a rank's thread before each operation: may block (a slow or stopped rank) or return
  // an error (a rank that fails at that operation).
  using FaultHook = std::function<absl::Status(const GroupSpec&, const CollectiveOp&)>;

  explicit ThreadWorld(FaultHook hook = {});
  ~ThreadWorld();

  // Ranks that name the same group meet in it; a name is used for one group only.
  CommunicatorFactory& factory();

 private:
  class Factory;
  std::unique_ptr<Factory> factory_;
};

}  // namespace dlo
