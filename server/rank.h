// What the parts of the frontend say to each other about ranks.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "dlo/v1/worker_link.pb.h"
#include "server/result_queue.h"

namespace dlo {

// Reasons of a loss: the process or its link is gone, it is alive and gets nowhere, or its group's
// collectives failed.
inline constexpr char kRankLost[] = "RANK_LOST";
inline constexpr char kWaveDeadline[] = "WAVE_DEADLINE";
inline constexpr char kCollectiveFailed[] = "COLLECTIVE_FAILED";
inline constexpr char kStuckVisit[] = "STUCK_VISIT";

// The way to the ranks. Thread-safe.
class RankLinks {
 public:
  virtual ~RankLinks() = default;
  // Queues a message for the rank; does not block. Dropped when the rank is not attached: its loss
  // is reported elsewhere.
  virtual void Send(int rank, v1::ToWorker message) = 0;
  virtual std::shared_ptr<ResultQueue> result_queue(int rank) = 0;
};

// Why a rank, and with it its dispatch domain, is gone.
struct RankLoss {
  int rank = -1;      // to blame
  std::string cause;  // for people, e.g. "was killed by signal 9"
  std::optional<int> signal;
  std::optional<int> exit_code;
  std::string reason = kRankLost;  // of the ErrorInfo
  std::string kind = {};           // of dlo_worker_restarts_total; empty: follows from the rest
  // Nobody else is to blame: it did not end or stop because it waited for another.
  bool certain = false;
  // Of its domain's flight recorders (loss_report.h); empty: there are none.
  std::string verdict;
  std::string report;  // the file
};

}  // namespace dlo
