// What the parts of the frontend say to each other about ranks.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "dlo/v1/worker_link.pb.h"
#include "server/result_queue.h"

namespace dlo {

// The way to the ranks. Thread-safe.
class RankLinks {
 public:
  virtual ~RankLinks() = default;
  // Queues a message for the rank; does not block. Dropped when the rank is not attached: its loss
  // is reported elsewhere.
  virtual void Send(int rank, v1::ToWorker message) = 0;
  virtual std::shared_ptr<ResultQueue> result_queue(int rank) = 0;
};

// Why a rank is gone.
struct RankLoss {
  std::string cause;  // for people, e.g. "was killed by signal 9"
  std::optional<int> signal;
  std::optional<int> exit_code;
};

}  // namespace dlo
