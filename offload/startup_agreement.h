// What the ranks of a weight group settle before the first gather, so that a difference between
// them is an error at startup and not a wrong video or a hang.
//
//   RETURN_IF_ERROR(AgreeOnHostMemory(group, {.need_bytes = shards, .limit_bytes = limit}));
//   ...  // allocate and load
//   RETURN_IF_ERROR(AgreeOnSettings(group, {{"build", BuildId()}, {"offload.slots", "2"}}));
//
// Both are collective: every rank of the group calls them at the same point, and each comes to the
// same verdict. Errors of the communicator come as they are.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "runtime/communicator.h"

namespace dlo {

struct Setting {
  std::string name;
  std::string value;
};

// FAILED_PRECONDITION naming every setting in which some rank differs from rank 0, with both
// values.
absl::Status AgreeOnSettings(Communicator& group, const std::vector<Setting>& settings);

struct HostMemoryNeed {
  int64_t need_bytes = 0;   // of this process
  int64_t limit_bytes = 0;  // of all processes on its host; 0: none
  std::string limit_name;   // where the limit comes from, for the error
  std::string host;         // the same for the processes of one machine, e.g. its boot id
};

// RESOURCE_EXHAUSTED on every rank if the needs on one host exceed the smallest limit there.
absl::Status AgreeOnHostMemory(Communicator& group, const HostMemoryNeed& need);

// The same for a process without a group, one of `processes` on its host with the same need.
absl::Status CheckHostMemory(const HostMemoryNeed& need, int processes);

}  // namespace dlo
