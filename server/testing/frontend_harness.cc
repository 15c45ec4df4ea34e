#include "server/testing/frontend_harness.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "google/rpc/status.pb.h"
#include "proto/build_id.h"

namespace dlo {
namespace {

class TestCard : public ModelCard {
 public:
  const std::string& name() const override { return name_; }

  std::vector<FieldViolation> Resolve(const RequestedSettings& requested, uint64_t random_seed,
                                      VideoSettings* resolved) const override {
    resolved->width = static_cast<int>(requested.width.value_or(16));
    resolved->height = static_cast<int>(requested.height.value_or(16));
    resolved->num_frames = static_cast<int>(requested.num_frames.value_or(5));
    resolved->fps = requested.fps.value_or(8);
    resolved->num_inference_steps = static_cast<int>(requested.num_inference_steps.value_or(4));
    resolved->guidance_scale = requested.guidance_scale.value_or(5);
    resolved->flow_shift = requested.flow_shift.value_or(3);
    resolved->solver = requested.solver.value_or("unipc");
    resolved->seed = requested.seed.value_or(random_seed);
    std::vector<FieldViolation> wrong;
    for (const auto& [field, value] :
         {std::pair{"settings.width", resolved->width}, {"settings.height", resolved->height}}) {
      if (value <= 0 || value % 16 != 0) {
        wrong.push_back({field, absl::StrCat(value, " is not a multiple of 16")});
      }
    }
    if (resolved->num_inference_steps < 1) {
      wrong.push_back({"settings.num_inference_steps", "must be at least 1"});
    }
    return wrong;
  }

  std::vector<FieldViolation> CheckPrompts(const std::string& prompt,
                                           const std::string& negative_prompt) const override {
    if (!prompt.empty()) return {};
    return {{"prompt", "is empty"}};
  }

 private:
  const std::string name_ = "test-model";
};

}  // namespace

std::shared_ptr<const ModelCard> NewTestCard() { return std::make_shared<TestCard>(); }

TestCall::TestCall(const std::shared_ptr<grpc::Channel>& channel,
                   const v1::GenerateRequest& request, absl::Duration timeout)
    : stub_(v1::VideoGeneration::NewStub(channel)) {
  context_.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  context_.set_wait_for_ready(true);
  reader_ = stub_->Generate(&context_, request);
}

TestCall::~TestCall() {
  if (finished_) return;
  Cancel();
  Finish();
}

bool TestCall::Read(v1::GenerateEvent* event) {
  if (!reader_->Read(event)) return false;
  if (event->has_job()) last_job_ = event->job();
  if (event->has_chunk()) {
    EXPECT_EQ(event->chunk().offset(), static_cast<int64_t>(video_.size()));
    EXPECT_LE(event->chunk().data().size(), size_t{1} << 20);
    video_ += event->chunk().data();
    event->mutable_chunk()->clear_data();
  }
  events_.push_back(*event);
  return true;
}

bool TestCall::ReadUntil(const std::function<bool(const v1::GenerateEvent&)>& found) {
  v1::GenerateEvent event;
  while (Read(&event)) {
    if (found(event)) return true;
  }
  return false;
}

bool TestCall::ReadUntilState(v1::JobState state) {
  return ReadUntil([state](const v1::GenerateEvent& event) {
    return event.has_job() && event.job().state() == state;
  });
}

bool TestCall::ReadUntilStep(int step) {
  return ReadUntil([step](const v1::GenerateEvent& event) {
    return event.has_progress() && event.progress().step() == step;
  });
}

grpc::Status TestCall::Finish() {
  v1::GenerateEvent event;
  while (Read(&event)) {
  }
  finished_ = true;
  return reader_->Finish();
}

template <typename T>
T Detail(const grpc::Status& status) {
  google::rpc::Status details;
  T detail;
  EXPECT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), status.error_code());
  for (const google::protobuf::Any& any : details.details()) {
    if (any.UnpackTo(&detail)) return detail;
  }
  ADD_FAILURE() << "no " << T::descriptor()->full_name() << " in: " << details.ShortDebugString();
  return detail;
}
template google::rpc::BadRequest Detail(const grpc::Status&);
template google::rpc::ErrorInfo Detail(const grpc::Status&);
template google::rpc::RetryInfo Detail(const grpc::Status&);

FrontendHarness::FrontendHarness(std::vector<std::string> worker_arguments) {
  std::string pattern = (std::filesystem::temp_directory_path() / "frontend-test-XXXXXX").string();
  folder_ = mkdtemp(pattern.data());
  options_.listen = absl::StrCat("unix:", Path("public.sock"));
  options_.store.folder = Path("data");
  options_.links.build_id = BuildId();
  options_.links.heartbeat_interval = absl::Milliseconds(50);
  options_.supervisor.worker_binary =
      std::filesystem::path(DLO_BINARY_DIR) / "tests" / "scripted-worker";
  options_.supervisor.worker_arguments = std::move(worker_arguments);
  options_.supervisor.backoff_initial = absl::Milliseconds(20);
  options_.on_serving = [this](bool serving) {
    absl::MutexLock lock(&mutex_);
    serving_ = serving;
  };
  options_.on_failure = [this](absl::Status status) {
    absl::MutexLock lock(&mutex_);
    failure_ = std::move(status);
  };
}

FrontendHarness::~FrontendHarness() {
  frontend_.reset();
  EXPECT_THAT(WorkerPids(), testing::IsEmpty());
  std::filesystem::remove_all(folder_);
}

void FrontendHarness::Start() {
  absl::StatusOr<std::unique_ptr<Frontend>> frontend = Frontend::Start(options_, NewTestCard());
  ASSERT_TRUE(frontend.ok()) << frontend.status();
  frontend_ = *std::move(frontend);
}

std::shared_ptr<grpc::Channel> FrontendHarness::channel() {
  grpc::ChannelArguments arguments;
  // A connection of its own, so that one client's flow control is not another's.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(frontend_->address(), grpc::InsecureChannelCredentials(),
                                   arguments);
}

bool FrontendHarness::WaitServing(bool serving) {
  absl::MutexLock lock(&mutex_);
  const auto reached = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return serving_ == serving; };
  return mutex_.AwaitWithTimeout(absl::Condition(&reached), kTestTimeout);
}

grpc::health::v1::HealthCheckResponse::ServingStatus FrontendHarness::Health(
    const std::string& service) {
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  grpc::health::v1::HealthCheckResponse response;
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(absl::ToChronoTime(absl::Now() + kTestTimeout));
  const grpc::Status status =
      grpc::health::v1::Health::NewStub(channel())->Check(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response.status();
}

absl::Status FrontendHarness::WaitFailure() {
  absl::MutexLock lock(&mutex_);
  const auto failed = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !failure_.ok(); };
  mutex_.AwaitWithTimeout(absl::Condition(&failed), kTestTimeout);
  return failure_;
}

std::vector<int> FrontendHarness::WorkerPids() {
  std::vector<int> pids;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream children(task.path() / "children");
    for (int pid; children >> pid;) pids.push_back(pid);
  }
  return pids;
}

int FrontendHarness::WorkerPid(int rank) {
  const std::string flag = absl::StrCat("--rank=", rank);
  for (int pid : WorkerPids()) {
    std::ifstream arguments(absl::StrCat("/proc/", pid, "/cmdline"));
    for (std::string argument; std::getline(arguments, argument, '\0');) {
      if (argument == flag) return pid;
    }
  }
  return -1;
}

void FrontendHarness::Touch(const std::string& name) const { std::ofstream(Path(name)).flush(); }

std::unique_ptr<TestCall> FrontendHarness::RunUntilStep(int step, const std::string& file,
                                                        const std::string& id) {
  auto call = std::make_unique<TestCall>(
      channel(), Request(absl::StrCat("hold_step=", step, ":", Path(file)), id));
  EXPECT_TRUE(call->ReadUntilStep(step));
  return call;
}

v1::GenerateRequest FrontendHarness::Request(const std::string& prompt, const std::string& id) {
  v1::GenerateRequest request;
  request.set_request_id(id);
  request.set_prompt(prompt);
  request.set_output_format(v1::OUTPUT_FORMAT_SAFETENSORS);
  request.mutable_settings()->set_seed(1);
  return request;
}

}  // namespace dlo
