#include "server/status_board.h"

#include <utility>

namespace dlo {

StatusBoard::StatusBoard(int num_ranks) {
  absl::MutexLock lock(&mutex_);
  for (int rank = 0; rank < num_ranks; ++rank) status_.add_ranks()->set_rank(rank);
}

void StatusBoard::SetServing(bool serving) {
  absl::MutexLock lock(&mutex_);
  status_.set_serving(serving);
}

void StatusBoard::SetReady(const std::vector<int>& ranks, bool ready) {
  absl::MutexLock lock(&mutex_);
  for (int rank : ranks) status_.mutable_ranks(rank)->set_ready(ready);
}

void StatusBoard::SetStartup(int rank, v1::StartupRecord record) {
  absl::MutexLock lock(&mutex_);
  *status_.mutable_ranks(rank)->mutable_startup() = std::move(record);
}

v1::ServerStatus StatusBoard::Get() const {
  absl::MutexLock lock(&mutex_);
  return status_;
}

}  // namespace dlo
