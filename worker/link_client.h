// The worker's end of its link to dlo-serve.
//
//   LinkClient link(channel, hello, &handler);   // says Hello; the handler is called from now on
//   link.Send(message);                          // blocks while dlo-serve does not take more
//   link.Close(absl::Seconds(2));
//
// Outgoing messages wait in a queue of a few; heartbeats are sent from a thread of their own and
// never wait behind more than the message on the wire: an unsent one is replaced. Send and Close
// are thread-safe. The handler is called on the reading thread.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <deque>
#include <memory>
#include <optional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "dlo/v1/worker_link.grpc.pb.h"

namespace dlo {

class LinkHandler {
 public:
  virtual ~LinkHandler() = default;
  virtual void OnWelcome(v1::Welcome welcome) {}
  virtual void OnAssignment(v1::Assignment assignment) = 0;
  virtual void OnCancel(uint64_t wave) = 0;
  virtual void OnDrain() = 0;
  // The stream ended: OK after Close, else why. The last call.
  virtual void OnClosed(absl::Status status) = 0;
  // What the next heartbeat says. Called on the heartbeat thread.
  virtual v1::Heartbeat CurrentHeartbeat() = 0;
};

class LinkClient {
 public:
  LinkClient(std::shared_ptr<grpc::Channel> channel, const v1::Hello& hello, LinkHandler* handler);
  // Breaks the stream if Close has not ended it.
  ~LinkClient();
  LinkClient(const LinkClient&) = delete;
  LinkClient& operator=(const LinkClient&) = delete;

  // False once the link is closed.
  bool Send(v1::FromWorker message);

  // Sends what was queued and waits at most `timeout` for dlo-serve to end the stream.
  void Close(absl::Duration timeout);

 private:
  void ReadLoop();
  void WriteLoop();
  void HeartbeatLoop();

  LinkHandler* const handler_;
  std::unique_ptr<v1::WorkerLink::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::FromWorker, v1::ToWorker>> stream_;

  absl::Mutex mutex_;
  std::deque<v1::FromWorker> outbox_ ABSL_GUARDED_BY(mutex_);
  std::optional<v1::Heartbeat> heartbeat_ ABSL_GUARDED_BY(mutex_);
  absl::Duration heartbeat_interval_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteDuration();
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread reader_;
  std::thread writer_;
  std::thread heartbeats_;
};

}  // namespace dlo
