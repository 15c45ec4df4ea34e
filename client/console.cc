#include "client/console.h"

#include <utility>

namespace dlo {

void Interrupt::Trigger(int signal) {
  absl::MutexLock lock(&mu_);
  if (signal_ != 0) return;
  signal_ = signal;
  if (callback_) callback_();
}

int Interrupt::signal() const {
  absl::MutexLock lock(&mu_);
  return signal_;
}

bool Interrupt::WaitFor(absl::Duration timeout) const {
  absl::MutexLock lock(&mu_);
  auto triggered = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return signal_ != 0; };
  return mu_.AwaitWithTimeout(absl::Condition(&triggered), timeout);
}

void Interrupt::Subscribe(std::function<void()> callback) {
  absl::MutexLock lock(&mu_);
  callback_ = std::move(callback);
  if (signal_ != 0) callback_();
}

void Interrupt::Unsubscribe() {
  absl::MutexLock lock(&mu_);
  callback_ = nullptr;
}

}  // namespace dlo
