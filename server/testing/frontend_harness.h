// A Frontend with real worker processes (scripted ones), and clients to it, for tests.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dlo/v1/video_generation.grpc.pb.h"
#include "google/rpc/error_details.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "server/frontend.h"

namespace dlo {

inline constexpr absl::Duration kTestTimeout = absl::Seconds(30);

// 4 steps of 16x16x5 by default; refuses a width or height that is not a multiple of 16, step
// counts below 1, and the prompt "".
std::shared_ptr<const ModelCard> NewTestCard();

// One streaming call, read by hand.
class TestCall {
 public:
  TestCall(const std::shared_ptr<grpc::Channel>& channel, const v1::GenerateRequest& request,
           absl::Duration timeout = kTestTimeout);
  ~TestCall();

  // The next event; false at the end of the stream.
  bool Read(v1::GenerateEvent* event);
  // Reads until `found` is true for an event. False if the stream ends before.
  bool ReadUntil(const std::function<bool(const v1::GenerateEvent&)>& found);
  bool ReadUntilState(v1::JobState state);
  bool ReadUntilStep(int step);
  void Cancel() { context_.TryCancel(); }
  // Reads the rest and returns the status.
  grpc::Status Finish();

  const std::vector<v1::GenerateEvent>& events() const { return events_; }  // chunks without data
  const std::string& video() const { return video_; }
  const v1::Job& last_job() const { return last_job_; }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<v1::VideoGeneration::Stub> stub_;
  std::unique_ptr<grpc::ClientReader<v1::GenerateEvent>> reader_;
  std::vector<v1::GenerateEvent> events_;
  std::string video_;
  v1::Job last_job_;
  bool finished_ = false;
};

// The first detail of type T in a status.
template <typename T>
T Detail(const grpc::Status& status);

class FrontendHarness {
 public:
  // Workers get `worker_arguments`. Times are short.
  explicit FrontendHarness(std::vector<std::string> worker_arguments = {});
  ~FrontendHarness();

  FrontendOptions& options() { return options_; }
  void Start();
  // Ends the server without grace. It can be started again on the same data.
  void Stop() { frontend_.reset(); }
  Frontend& frontend() { return *frontend_; }
  std::shared_ptr<grpc::Channel> channel();

  // Waits for the condition; false after kTestTimeout.
  bool WaitServing(bool serving);
  grpc::health::v1::HealthCheckResponse::ServingStatus Health(const std::string& service = "");
  absl::Status WaitFailure();

  // The worker processes that are children of this process, by /proc.
  static std::vector<int> WorkerPids();

  // The process of a rank; -1 while there is none.
  static int WorkerPid(int rank);

  // A path in a folder of this test's own; Touch makes the file, for prompts that hold.
  std::string Path(const std::string& name) const { return (folder_ / name).string(); }
  void Touch(const std::string& name) const;

  static v1::GenerateRequest Request(const std::string& prompt, const std::string& id = "");

  // A request that has done `step` steps and goes on once the file is touched.
  std::unique_ptr<TestCall> RunUntilStep(int step, const std::string& file,
                                         const std::string& id = "");

 private:
  FrontendOptions options_;
  std::filesystem::path folder_;
  absl::Mutex mutex_;
  bool serving_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Frontend> frontend_;
};

}  // namespace dlo
