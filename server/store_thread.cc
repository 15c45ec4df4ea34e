#include "server/store_thread.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "base/status_macros.h"

namespace dlo {
namespace {

constexpr absl::Duration kRetryInterval = absl::Seconds(1);
constexpr size_t kBatchMax = 1024;

}  // namespace

StoreThread::StoreThread(std::unique_ptr<JobStore> store)
    : store_(std::move(store)), thread_([this] { Loop(); }) {}

StoreThread::~StoreThread() {
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
  }
  thread_.join();
}

void StoreThread::Run(JobStore::Operation operation, Done done, Retry retry) {
  absl::MutexLock lock(&mutex_);
  inbox_.push_back({std::move(operation), std::move(done), retry});
}

void StoreThread::Flush() {
  absl::MutexLock lock(&mutex_);
  const auto idle = [this]()
                        ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return inbox_.empty() && !busy_; };
  mutex_.Await(absl::Condition(&idle));
}

void StoreThread::Loop() {
  const auto awake = [this]()
                         ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopped_ || !inbox_.empty(); };
  while (true) {
    std::vector<Request> batch;
    {
      absl::MutexLock lock(&mutex_);
      busy_ = false;
      mutex_.AwaitWithDeadline(absl::Condition(&awake), std::min(retry_at_, next_expiry_));
      if (stopped_ && inbox_.empty()) break;
      const size_t size = std::min(inbox_.size(), kBatchMax);
      batch.assign(std::make_move_iterator(inbox_.begin()),
                   std::make_move_iterator(inbox_.begin() + size));
      inbox_.erase(inbox_.begin(), inbox_.begin() + size);
      busy_ = true;
    }
    if (absl::Now() >= retry_at_) {
      retry_at_ = absl::InfiniteFuture();
      RunBatch(std::exchange(failed_, {}));
    }
    if (!batch.empty()) RunBatch(std::move(batch));
    RemoveExpired();
  }
  RunBatch(std::exchange(failed_, {}));
  if (!failed_.empty()) {
    spdlog::error("the end of {} jobs could not be recorded; after a restart they count as failed",
                  failed_.size());
  }
}

void StoreThread::RunBatch(std::vector<Request> batch) {
  if (batch.empty()) return;
  std::vector<JobStore::Operation> operations;
  operations.reserve(batch.size());
  for (const Request& request : batch) operations.push_back(request.operation);
  const std::vector<absl::Status> statuses = store_->Transaction(operations);
  for (size_t i = 0; i < batch.size(); ++i) {
    batch[i].done(statuses[i]);
    const bool final = statuses[i].ok() || absl::IsNotFound(statuses[i]) ||
                       absl::IsAlreadyExists(statuses[i]) || batch[i].retry == Retry::kNo;
    if (final) continue;
    failed_.push_back(std::move(batch[i]));
    retry_at_ = absl::Now() + kRetryInterval;
  }
}

void StoreThread::RemoveExpired() {
  int removed = 0;
  const std::vector<absl::Status> statuses =
      store_->Transaction({[this, &removed](JobStore& store) -> absl::Status {
        ASSIGN_OR_RETURN(next_expiry_, store.NextExpiry());
        if (next_expiry_ > absl::Now()) return absl::OkStatus();
        ASSIGN_OR_RETURN(removed, store.RemoveExpired(absl::Now()));
        ASSIGN_OR_RETURN(next_expiry_, store.NextExpiry());
        return absl::OkStatus();
      }});
  if (!statuses[0].ok()) {
    spdlog::error("expired jobs cannot be removed: {}", std::string(statuses[0].message()));
    next_expiry_ = absl::Now() + kRetryInterval;
  } else if (removed > 0) {
    spdlog::info("removed {} jobs whose time was up", removed);
  }
}

}  // namespace dlo
