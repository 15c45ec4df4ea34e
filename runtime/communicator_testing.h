// What every implementation of Communicator must do, for tests to run on each rank of a group.
//
//   std::string problems = CheckCollectives(*communicator);  // on every rank, thread or process
//
// Returns text rather than asserting, so that a rank may be another process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "runtime/communicator.h"

namespace dlo {

// Memory that both the test and the communicator can use.
using TestMemory = std::function<std::shared_ptr<std::byte>(int64_t bytes)>;

// Every operation at byte counts of 0, 1, odd ones and beyond 1 MiB, with contents that depend on
// rank, peer and position. Empty if all is as it must be. Ends at the first operation that fails,
// as the ranks are out of step then.
std::string CheckCollectives(Communicator& communicator);
std::string CheckCollectives(Communicator& communicator, const TestMemory& memory);

}  // namespace dlo
