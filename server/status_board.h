// What GetStatus answers: which ranks are ready, and the record of each one's latest start.
//
//   StatusBoard board(2);
//   board.SetStartup(0, record);
//   board.SetReady({0}, true);
//
// Thread-safe; only remembers.
#pragma once

#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "dlo/v1/video_generation.pb.h"

namespace dlo {

class StatusBoard {
 public:
  explicit StatusBoard(int num_ranks);

  void SetServing(bool serving);
  void SetReady(const std::vector<int>& ranks, bool ready);
  void SetStartup(int rank, v1::StartupRecord record);

  v1::ServerStatus Get() const;

 private:
  mutable absl::Mutex mutex_;
  v1::ServerStatus status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dlo
