#include "worker/link_client.h"

#include <utility>

#include "absl/time/clock.h"
#include "proto/convert.h"

namespace dlo {
namespace {

// Chunks are at most 1 MiB, so this bounds the queue's bytes too.
constexpr size_t kOutboxMessagesMax = 4;

}  // namespace

LinkClient::LinkClient(std::shared_ptr<grpc::Channel> channel, const v1::Hello& hello,
                       LinkHandler* handler)
    : handler_(handler), stub_(v1::WorkerLink::NewStub(channel)) {
  stream_ = stub_->Attach(&context_);
  v1::FromWorker message;
  *message.mutable_hello() = hello;
  outbox_.push_back(std::move(message));
  writer_ = std::thread([this] { WriteLoop(); });
  reader_ = std::thread([this] { ReadLoop(); });
  heartbeats_ = std::thread([this] { HeartbeatLoop(); });
}

LinkClient::~LinkClient() {
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
  }
  context_.TryCancel();
  reader_.join();
  writer_.join();
  heartbeats_.join();
}

bool LinkClient::Send(v1::FromWorker message) {
  absl::MutexLock lock(&mutex_);
  const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return closing_ || closed_ || outbox_.size() < kOutboxMessagesMax;
  };
  mutex_.Await(absl::Condition(&ready));
  if (closing_ || closed_) return false;
  outbox_.push_back(std::move(message));
  return true;
}

void LinkClient::Close(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  closing_ = true;
  mutex_.AwaitWithTimeout(absl::Condition(&closed_), timeout);
}

void LinkClient::ReadLoop() {
  v1::ToWorker message;
  while (stream_->Read(&message)) {
    switch (message.message_case()) {
      case v1::ToWorker::kWelcome: {
        {
          absl::MutexLock lock(&mutex_);
          heartbeat_interval_ = FromProto(message.welcome().heartbeat_interval());
        }
        handler_->OnWelcome(std::move(*message.mutable_welcome()));
        break;
      }
      case v1::ToWorker::kAssignment:
        handler_->OnAssignment(std::move(*message.mutable_assignment()));
        break;
      case v1::ToWorker::kCancel:
        handler_->OnCancel(message.cancel().wave_id());
        break;
      case v1::ToWorker::kDrain:
        handler_->OnDrain();
        break;
      case v1::ToWorker::MESSAGE_NOT_SET:
        break;
    }
  }
  const grpc::Status end = stream_->Finish();
  bool expected;
  {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
    expected = closing_;
  }
  if (expected) {
    handler_->OnClosed(absl::OkStatus());
  } else if (end.ok()) {
    handler_->OnClosed(absl::UnavailableError("dlo-serve closed the link"));
  } else {
    handler_->OnClosed(
        absl::Status(static_cast<absl::StatusCode>(end.error_code()), end.error_message()));
  }
}

void LinkClient::WriteLoop() {
  while (true) {
    v1::FromWorker message;
    {
      absl::MutexLock lock(&mutex_);
      const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return closing_ || closed_ || heartbeat_ || !outbox_.empty();
      };
      mutex_.Await(absl::Condition(&ready));
      if (closed_) return;
      if (heartbeat_) {
        *message.mutable_heartbeat() = *std::exchange(heartbeat_, std::nullopt);
      } else if (!outbox_.empty()) {
        message = std::move(outbox_.front());
        outbox_.pop_front();
      } else {
        break;  // closing
      }
    }
    // A failed write means that the stream has ended; the reader finds out why.
    if (!stream_->Write(message)) return;
  }
  stream_->WritesDone();
}

void LinkClient::HeartbeatLoop() {
  absl::MutexLock lock(&mutex_);
  const auto stopped = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return closing_ || closed_; };
  const auto welcome = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return closing_ || closed_ || heartbeat_interval_ < absl::InfiniteDuration();
  };
  mutex_.Await(absl::Condition(&welcome));
  while (!mutex_.AwaitWithTimeout(absl::Condition(&stopped), heartbeat_interval_)) {
    heartbeat_ = handler_->CurrentHeartbeat();
  }
}

}  // namespace dlo
