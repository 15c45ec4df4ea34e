// The dlo-serve binary as a process, with a scripted worker beside it in the place of dlo-worker
// and the demo model's card.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/convert.h"
#include "server/testing/frontend_harness.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

bool WaitFor(const std::function<bool()>& condition) {
  for (const absl::Time end = absl::Now() + kTestTimeout; absl::Now() < end;) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return false;
}

std::string ReadFile(const fs::path& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class ServeTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "serve-test-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    fs::create_directories(folder_ / "bin");
    fs::create_directories(folder_ / "tmp");
    fs::copy_file(fs::path(DLO_BINARY_DIR) / "bin/dlo-serve", folder_ / "bin/dlo-serve");
    UseWorker("");
  }
  void TearDown() override {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    fs::remove_all(folder_);
  }

  void UseWorker(const std::string& flags) {
    const fs::path script = folder_ / "bin/dlo-worker";
    std::ofstream(script) << "#!/bin/sh\nexec '" << DLO_BINARY_DIR << "/tests/scripted-worker' "
                          << flags << " \"$@\"\n";
    fs::permissions(script, fs::perms::owner_all);
  }

  void Start(std::vector<std::string> arguments) {
    const std::string binary = (folder_ / "bin/dlo-serve").string();
    arguments.insert(arguments.begin(), {binary, "--data-dir=" + (folder_ / "data").string()});
    const std::string log = (folder_ / "log").string();
    const std::string tmp = "TMPDIR=" + (folder_ / "tmp").string();
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    pid_ = fork();
    ASSERT_GE(pid_, 0);
    if (pid_ == 0) {
      const int fd = open(log.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
      dup2(fd, STDOUT_FILENO);
      dup2(fd, STDERR_FILENO);
      const char* environment[] = {"PATH=/usr/bin:/bin", tmp.c_str(), nullptr};
      execve(binary.c_str(), argv.data(), const_cast<char**>(environment));
      _exit(127);
    }
  }

  std::string Log() const { return ReadFile(folder_ / "log"); }

  // The address behind the latest "serving on".
  std::string WaitServing() {
    std::string address;
    WaitFor([&] {
      const std::string log = Log();
      const size_t at = log.rfind("serving on ");
      if (at == std::string::npos) return false;
      const size_t start = at + std::string("serving on ").size();
      const size_t end = log.find('\n', start);
      if (end == std::string::npos) return false;
      address = log.substr(start, end - start);
      return true;
    });
    EXPECT_FALSE(address.empty()) << Log();
    return address;
  }

  // The wait status; -1 if it does not end.
  int WaitExit() {
    int status = -1;
    const bool ended = WaitFor([&] { return waitpid(pid_, &status, WNOHANG) == pid_; });
    if (ended) pid_ = -1;
    return ended ? status : -1;
  }

  std::vector<int> Workers() const {
    std::vector<int> pids;
    for (const auto& task : fs::directory_iterator(absl::StrCat("/proc/", pid_, "/task"))) {
      std::ifstream children(task.path() / "children");
      for (int pid; children >> pid;) pids.push_back(pid);
    }
    return pids;
  }

  static std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address) {
    return grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  }

  fs::path folder_;
  pid_t pid_ = -1;
};

bool IsAlive(int pid) { return kill(pid, 0) == 0; }

TEST_F(ServeTest, SigtermFinishesWhatRunsExitsWithZeroAndLeavesNothing) {
  const fs::path socket = folder_ / "public.sock";
  Start({"--listen=unix:" + socket.string()});
  const std::string address = WaitServing();
  const std::vector<int> workers = Workers();
  ASSERT_EQ(workers.size(), 1u);
  const std::string go = (folder_ / "go").string();
  TestCall call(ChannelTo(address), FrontendHarness::Request("hold_step=1:" + go));
  ASSERT_TRUE(call.ReadUntilStep(1)) << call.Finish().error_message();
  kill(pid_, SIGTERM);
  ASSERT_TRUE(WaitFor([&] { return Log().find("shutting down") != std::string::npos; }));
  std::ofstream(go).flush();
  EXPECT_TRUE(call.Finish().ok());
  const int status = WaitExit();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status << Log();
  EXPECT_FALSE(IsAlive(workers[0]));
  EXPECT_FALSE(fs::exists(socket));
  EXPECT_TRUE(fs::is_empty(folder_ / "tmp"));
}

TEST_F(ServeTest, ASecondSignalEndsItAtOnceAndLeavesNothing) {
  const fs::path socket = folder_ / "public.sock";
  Start({"--listen=unix:" + socket.string()});
  const std::string address = WaitServing();
  const int worker = Workers().at(0);
  TestCall call(ChannelTo(address),
                FrontendHarness::Request("hold_step=1:" + (folder_ / "never").string()));
  ASSERT_TRUE(call.ReadUntilStep(1));
  kill(pid_, SIGINT);
  ASSERT_TRUE(WaitFor([&] { return Log().find("shutting down") != std::string::npos; }));
  kill(pid_, SIGINT);
  const int status = WaitExit();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 128 + SIGINT) << status << Log();
  EXPECT_TRUE(WaitFor([&] { return !IsAlive(worker); }));
  EXPECT_FALSE(fs::exists(socket));
  EXPECT_TRUE(fs::is_empty(folder_ / "tmp"));
}

// A blocking client looks at its connection every five seconds between calls, a health watcher
// never ends its call.
TEST_F(ServeTest, SigtermDoesNotWaitForClientsThatAskNothing) {
  Start({"--listen=127.0.0.1:0"});
  const auto channel = ChannelTo(WaitServing());
  EXPECT_TRUE(TestCall(channel, FrontendHarness::Request("x")).Finish().ok());
  const auto health = grpc::health::v1::Health::NewStub(channel);
  grpc::ClientContext context;
  const auto watcher = health->Watch(&context, {});
  grpc::health::v1::HealthCheckResponse response;
  ASSERT_TRUE(watcher->Read(&response));
  const absl::Time start = absl::Now();
  kill(pid_, SIGTERM);
  const int status = WaitExit();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status << Log();
  EXPECT_LT(absl::Now() - start, absl::Seconds(4));
  context.TryCancel();
  watcher->Finish();
}

TEST_F(ServeTest, AKilledServerTakesItsWorkerAlong) {
  Start({"--listen=127.0.0.1:0"});
  WaitServing();
  const int worker = Workers().at(0);
  kill(pid_, SIGKILL);
  EXPECT_TRUE(WIFSIGNALED(WaitExit()));
  EXPECT_TRUE(WaitFor([&] { return !IsAlive(worker); }));
  EXPECT_TRUE(fs::is_empty(folder_ / "tmp"));
}

TEST_F(ServeTest, ServesAsManyRequestsAtATimeAsDpSaysAndTakesAllWorkersAlong) {
  Start({"--listen=127.0.0.1:0", "--dp=3"});
  const std::string address = WaitServing();
  const std::string go = (folder_ / "go").string();
  std::vector<std::unique_ptr<TestCall>> calls;
  for (int i = 0; i < 3; ++i) {
    calls.push_back(std::make_unique<TestCall>(ChannelTo(address),
                                               FrontendHarness::Request("hold_step=1:" + go)));
  }
  for (auto& call : calls) ASSERT_TRUE(call->ReadUntilStep(1)) << Log();
  const std::vector<int> workers = Workers();
  EXPECT_EQ(workers.size(), 3u);
  std::ofstream(go).flush();
  for (auto& call : calls) EXPECT_TRUE(call->Finish().ok());
  kill(pid_, SIGTERM);
  const int status = WaitExit();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status << Log();
  for (const int worker : workers) EXPECT_FALSE(IsAlive(worker));
  EXPECT_TRUE(fs::is_empty(folder_ / "tmp"));
}

TEST_F(ServeTest, AKilledServerTakesAllItsWorkersAlong) {
  Start({"--listen=127.0.0.1:0", "--dp=3"});
  WaitServing();
  ASSERT_TRUE(WaitFor([&] { return Workers().size() == 3; }));
  const std::vector<int> workers = Workers();
  kill(pid_, SIGKILL);
  EXPECT_TRUE(WIFSIGNALED(WaitExit()));
  for (const int worker : workers) EXPECT_TRUE(WaitFor([&] { return !IsAlive(worker); }));
}

v1::Job Submit(v1::VideoGeneration::Stub& stub, const v1::GenerateRequest& request) {
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(absl::ToChronoTime(absl::Now() + kTestTimeout));
  v1::Job job;
  const grpc::Status status = stub.SubmitJob(&context, request, &job);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return job;
}

// The last Job that WatchJob tells, or the first in `state`.
v1::Job WatchUntil(v1::VideoGeneration::Stub& stub, const std::string& id,
                   v1::JobState state = v1::JOB_STATE_UNSPECIFIED) {
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(absl::ToChronoTime(absl::Now() + kTestTimeout));
  v1::WatchJobRequest request;
  request.set_id(id);
  v1::Job job;
  v1::GenerateEvent event;
  const auto reader = stub.WatchJob(&context, request);
  while (reader->Read(&event)) {
    if (event.has_job()) job = event.job();
    if (event.has_job() && job.state() == state) context.TryCancel();
  }
  reader->Finish();
  return job;
}

TEST_F(ServeTest, AfterAKillQueuedJobsRunThoseThatRanHaveFailedAndResultsAreThere) {
  const std::string address = "unix:" + (folder_ / "public.sock").string();
  Start({"--listen=" + address});
  WaitServing();
  auto stub = v1::VideoGeneration::NewStub(ChannelTo(address));
  Submit(*stub, FrontendHarness::Request("x", "ended"));
  const v1::Job ended = WatchUntil(*stub, "ended");
  ASSERT_EQ(ended.state(), v1::JOB_STATE_SUCCEEDED);
  const std::string hold = "hold_step=1:" + (folder_ / "never").string();
  Submit(*stub, FrontendHarness::Request(hold, "running"));
  EXPECT_EQ(WatchUntil(*stub, "running", v1::JOB_STATE_DENOISING).state(), v1::JOB_STATE_DENOISING);
  std::vector<v1::Job> waiting;
  for (const char* id : {"w0", "w1", "w2"}) {
    waiting.push_back(Submit(*stub, FrontendHarness::Request("x", id)));
    EXPECT_EQ(waiting.back().state(), v1::JOB_STATE_QUEUED);
  }
  kill(pid_, SIGKILL);
  EXPECT_TRUE(WIFSIGNALED(WaitExit()));

  Start({"--listen=" + address});
  stub = v1::VideoGeneration::NewStub(ChannelTo(address));
  const v1::Job lost = WatchUntil(*stub, "running");
  EXPECT_EQ(lost.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(lost.failure().reason(), "SERVER_RESTARTED");
  EXPECT_THAT(lost.failure().message(), HasSubstr("JOB_STATE_DENOISING"));
  absl::Time last_start = absl::InfinitePast();
  for (const v1::Job& before : waiting) {
    // Sent again, as by a client that did not get its answer.
    EXPECT_EQ(Submit(*stub, FrontendHarness::Request("other", before.id())).create_time().nanos(),
              before.create_time().nanos());
    const v1::Job after = WatchUntil(*stub, before.id());
    EXPECT_EQ(after.state(), v1::JOB_STATE_SUCCEEDED) << after.ShortDebugString();
    EXPECT_EQ(after.settings().SerializeAsString(), before.settings().SerializeAsString());
    // In the order in which they were queued.
    EXPECT_GT(FromProto(after.start_time()), last_start);
    last_start = FromProto(after.start_time());
  }
  EXPECT_EQ(Submit(*stub, FrontendHarness::Request("x", "ended")).SerializeAsString(),
            ended.SerializeAsString());
  EXPECT_EQ(fs::file_size(folder_ / "data/results/ended.result"),
            static_cast<uintmax_t>(ended.result().size_bytes()));
}

TEST_F(ServeTest, ASecondServerOnTheSameDataExitsWithTheReason) {
  Start({"--listen=127.0.0.1:0"});
  WaitServing();
  const pid_t first = pid_;
  Start({"--listen=127.0.0.1:0"});
  const int status = WaitExit();
  pid_ = first;
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << status;
  EXPECT_THAT(Log(), HasSubstr(absl::StrCat("in use by another dlo-serve (process ", first, ")")));
}

TEST_F(ServeTest, PrintsThePortThatItChose) {
  Start({"--listen=127.0.0.1:0"});
  const std::string address = WaitServing();
  EXPECT_THAT(address, testing::MatchesRegex("127\\.0\\.0\\.1:[1-9][0-9]*"));
  EXPECT_TRUE(TestCall(ChannelTo(address), FrontendHarness::Request("a red circle")).Finish().ok());
}

TEST_F(ServeTest, AModelThatCannotBeLoadedEndsItWithTheReason) {
  UseWorker("--load-error=disk-on-fire");
  Start({"--listen=127.0.0.1:0"});
  const int status = WaitExit();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << status;
  EXPECT_THAT(Log(), HasSubstr("could not load the model: disk-on-fire"));
}

TEST_F(ServeTest, RefusesTheWrongFieldsOfARealModel) {
  Start({"--listen=127.0.0.1:0"});
  v1::GenerateRequest request = FrontendHarness::Request("x");
  request.mutable_settings()->set_width(100);
  request.mutable_settings()->set_num_inference_steps(0);
  const grpc::Status status = TestCall(ChannelTo(WaitServing()), request).Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("settings.width"));
  EXPECT_THAT(status.error_message(), HasSubstr("settings.num_inference_steps"));
}

TEST_F(ServeTest, LinksNoLibtorch) {
  const std::string command = "ldd " + (folder_ / "bin/dlo-serve").string();
  FILE* const pipe = popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string libraries;
  for (int c; (c = fgetc(pipe)) != EOF;) libraries.push_back(static_cast<char>(c));
  ASSERT_EQ(pclose(pipe), 0);
  EXPECT_THAT(libraries, HasSubstr("libgrpc++"));
  EXPECT_THAT(libraries, Not(HasSubstr("torch")));
  EXPECT_THAT(libraries, Not(HasSubstr("libc10")));
}

}  // namespace
}  // namespace dlo
