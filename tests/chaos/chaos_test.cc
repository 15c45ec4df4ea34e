// What happens when parts of a running service die, stop, lie or fill up: the real dlo-serve and
// dlo-worker on the demo model. docs/internals/faults.md has a row for each test.
//
//   chaos_test             a row of every kind
//   chaos_test --long      every rank, phase and signal (about 20 minutes, mostly waiting for a
//                          stopped rank's heartbeats)
#include <gmock/gmock.h>
#include <grpcpp/client_context.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/sha256.h"
#include "server/testing/frontend_harness.h"
#include "tests/e2e/served_group.h"

namespace dlo {
namespace {

using grpc::StatusCode;
using testing::HasSubstr;

constexpr absl::Duration kCallTimeout = absl::Seconds(120);
// On an idle machine five seconds are promised; others may be busy.
constexpr absl::Duration kServingAgainMax = absl::Seconds(20);
// From a stopped process's last heartbeat to its kill; from its start if it has sent nothing yet.
constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(10);
constexpr absl::Duration kAttachTimeout = absl::Seconds(30);
constexpr absl::Duration kStopMax = absl::Seconds(10);

bool run_all = false;

v1::GenerateRequest Request(int seed, int size = 32, int frames = 5) {
  v1::GenerateRequest request;
  request.set_prompt("a red circle moving right on a black background");
  request.set_output_format(v1::OUTPUT_FORMAT_SAFETENSORS);
  v1::VideoSettings* const settings = request.mutable_settings();
  settings->set_width(size);
  settings->set_height(size);
  settings->set_num_frames(frames);
  settings->set_num_inference_steps(2);
  settings->set_seed(seed);
  return request;
}

using Calls = std::vector<std::unique_ptr<TestCall>>;

Calls Send(const ServedGroup& group, int count) {
  Calls calls;
  for (int i = 0; i < count; ++i) {
    calls.push_back(std::make_unique<TestCall>(group.channel(), Request(i), kCallTimeout));
  }
  return calls;
}

void ExpectWhole(TestCall& call) {
  const grpc::Status status = call.Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  Sha256 hash;
  hash.Update(call.video());
  EXPECT_EQ(call.last_job().result().sha256(), hash.Finish());
}

void ExpectAllWhole(const Calls& calls) {
  for (const auto& call : calls) ExpectWhole(*call);
}

// A group that is ready.
std::unique_ptr<ServedGroup> Serve(ServedGroup::Options options) {
  const int dp = options.dp;
  absl::StatusOr<std::unique_ptr<ServedGroup>> group = ServedGroup::Create(std::move(options));
  if (!group.ok()) {
    ADD_FAILURE() << group.status();
    return nullptr;
  }
  (*group)->Arm("ready", "note");
  if (const absl::Status started = (*group)->Start(); !started.ok()) {
    ADD_FAILURE() << started;
    return nullptr;
  }
  for (int rank = 0; rank < dp; ++rank) {
    EXPECT_GT((*group)->WaitReached("ready", rank), 0) << (*group)->Log();
  }
  return *std::move(group);
}

void ExpectEndsCleanly(ServedGroup& group) {
  const absl::StatusOr<absl::Duration> took = group.Stop();
  ASSERT_TRUE(took.ok()) << took.status();
  EXPECT_LT(*took, kStopMax);
  EXPECT_EQ(group.Leftovers(), "");
}

void Report(const std::string& what, absl::Duration serving_again) {
  const std::string seconds = absl::StrCat(absl::ToDoubleSeconds(serving_again));
  std::cout << "[ serving  ] again after " << seconds << " s: " << what << std::endl;
  testing::Test::RecordProperty("seconds_to_serving", seconds);
}

struct Phase {
  const char* name;
  const char* place;  // where a rank is held; empty: nowhere
};
constexpr Phase kLoading = {"Loading", "loading"};
constexpr Phase kIdle = {"Idle", ""};
constexpr Phase kEncoding = {"Encoding", "encoding"};
constexpr Phase kDenoising = {"Denoising", "denoising"};
constexpr Phase kDecoding = {"Decoding", "decoding"};
constexpr Phase kSending = {"Sending", "chunk"};
constexpr Phase kPhases[] = {kLoading, kIdle, kEncoding, kDenoising, kDecoding, kSending};

struct Fault {
  int dp;
  int victim;
  Phase phase;
  int signal;
  std::string transfer = "none";

  bool loading() const { return phase.place == std::string("loading"); }
  bool idle() const { return phase.place[0] == '\0'; }
  // Whether the loss of a rank is that of all.
  bool collective() const { return transfer == "allgather"; }
};

std::string NameOf(const Fault& fault) {
  std::string transfer = fault.transfer;
  transfer.erase(std::remove(transfer.begin(), transfer.end(), '-'), transfer.end());
  return absl::StrCat(fault.phase.name, fault.signal == SIGKILL ? "Kill" : "Stop", fault.victim,
                      "Of", fault.dp, transfer);
}

void PrintTo(const Fault& fault, std::ostream* out) { *out << NameOf(fault); }
void PrintTo(const Phase& phase, std::ostream* out) { *out << phase.name; }

// How weights reach the device; with allgather a rank takes its whole domain along.
const char* const kTransfers[] = {"none", "rank-local", "allgather"};

std::vector<Fault> Faults() {
  if (!run_all) {
    return {{2, 1, kLoading, SIGKILL},
            {2, 0, kIdle, SIGKILL, "allgather"},
            {2, 1, kEncoding, SIGKILL},
            {2, 0, kDenoising, SIGKILL, "rank-local"},
            {3, 1, kDenoising, SIGKILL, "allgather"},
            {4, 3, kDecoding, SIGKILL},
            {2, 0, kSending, SIGKILL, "allgather"},
            {2, 1, kSending, SIGKILL},
            {2, 1, kDenoising, SIGSTOP, "allgather"}};
  }
  std::vector<Fault> faults;
  for (const char* transfer : kTransfers) {
    for (int dp = 2; dp <= 4; ++dp) {
      for (int victim = 0; victim < dp; ++victim) {
        for (const Phase& phase : kPhases) {
          for (const int signal : {SIGKILL, SIGSTOP}) {
            faults.push_back({dp, victim, phase, signal, transfer});
          }
        }
      }
    }
  }
  return faults;
}

class RankFault : public testing::TestWithParam<Fault> {
 protected:
  void SetUp() override {
    const Fault& fault = GetParam();
    auto created = ServedGroup::Create({.dp = fault.dp, .transfer = fault.transfer});
    ASSERT_TRUE(created.ok()) << created.status();
    group_ = *std::move(created);
    group_->Arm("ready", "note");
    if (fault.loading()) group_->Arm("loading", "hold", fault.victim);
    const absl::Status started = group_->Start();
    ASSERT_TRUE(started.ok()) << started;
    for (int rank = 0; rank < fault.dp; ++rank) {
      if (fault.loading() && (rank == fault.victim || fault.collective())) continue;
      ASSERT_GT(group_->WaitReached("ready", rank), 0) << group_->Log();
    }
  }

  // Brings every rank into the phase and as many requests into the queue; returns the victim.
  pid_t Reach() {
    const Fault& fault = GetParam();
    if (fault.idle()) return group_->Workers()[fault.victim];
    if (fault.loading()) return group_->WaitReached("loading", fault.victim);
    group_->Arm(fault.phase.place, "hold");
    running_ = Send(*group_, fault.dp);
    for (int rank = 0; rank < fault.dp; ++rank) {
      EXPECT_GT(group_->WaitReached(fault.phase.place, rank), 0) << rank;
    }
    const absl::Time end = absl::Now() + kCallTimeout;
    const bool sending = fault.phase.place == std::string("chunk");
    while (sending && group_->CountPartialResults() < fault.dp && absl::Now() < end) {
    }
    waiting_ = Send(*group_, fault.dp);
    for (const auto& call : waiting_) EXPECT_TRUE(call->ReadUntilState(v1::JOB_STATE_QUEUED));
    return group_->WaitReached(fault.phase.place, fault.victim);
  }

  void Release() {
    const Fault& fault = GetParam();
    if (fault.loading()) group_->Disarm("loading", fault.victim);
    if (!fault.idle()) group_->Disarm(fault.phase.place);
  }

  void ExpectLost(const grpc::Status& status, const v1::Job& job) {
    const Fault& fault = GetParam();
    EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE) << status.error_message();
    const auto info = Detail<google::rpc::ErrorInfo>(status);
    EXPECT_EQ(info.reason(), "RANK_LOST");
    EXPECT_EQ(info.metadata().at("rank"), absl::StrCat(fault.victim));
    if (fault.signal == SIGKILL) {
      EXPECT_EQ(info.metadata().at("signal"), "9");
    } else {
      EXPECT_THAT(status.error_message(), HasSubstr("was not heard of"));
    }
    EXPECT_EQ(job.state(), v1::JOB_STATE_FAILED);
  }

  // Every rank runs a request at the same time, the victim's in the process `pid`.
  void ExpectAllRanksServe(pid_t pid) {
    const Fault& fault = GetParam();
    group_->Forget("denoising");
    group_->Arm("denoising", "hold");
    const Calls calls = Send(*group_, fault.dp);
    for (int rank = 0; rank < fault.dp; ++rank) {
      const pid_t reached = group_->WaitReached("denoising", rank);
      EXPECT_GT(reached, 0) << rank << "\n" << group_->Log();
      if (rank == fault.victim) {
        EXPECT_EQ(reached, pid);
      }
    }
    group_->Disarm("denoising");
    ExpectAllWhole(calls);
  }

  std::unique_ptr<ServedGroup> group_;
  Calls running_;
  Calls waiting_;
};

TEST_P(RankFault, IsBoundedExplainedAndSurvived) {
  const Fault& fault = GetParam();
  const pid_t victim = Reach();
  ASSERT_GT(victim, 0);
  ASSERT_EQ(kill(victim, fault.signal), 0);
  const absl::Time struck = absl::Now();
  // The others of a domain stay held: in the last phase they could get their answers out before
  // they are ended, too.
  if (!fault.collective() || fault.loading()) Release();
  const pid_t successor = group_->WaitReached("ready", fault.victim, victim);
  const absl::Duration took = absl::Now() - struck;
  Release();
  ASSERT_GT(successor, 0) << group_->Log();
  Report(NameOf(fault), took);
  absl::Duration bound = kServingAgainMax;
  if (fault.signal == SIGSTOP) bound += fault.loading() ? kAttachTimeout : kHeartbeatTimeout;
  EXPECT_LT(took, bound);
  int lost = 0;
  for (const auto& call : running_) {
    const grpc::Status status = call->Finish();
    if (status.ok()) {
      EXPECT_NE(call->last_job().result().ranks(0).rank(), fault.victim);
      continue;
    }
    ++lost;
    ExpectLost(status, call->last_job());
  }
  if (!running_.empty()) {
    EXPECT_EQ(lost, fault.collective() ? fault.dp : 1);
  }
  ExpectAllWhole(waiting_);
  ExpectAllRanksServe(successor);
  EXPECT_TRUE(group_->WaitServing(true, absl::Seconds(20)));
  EXPECT_EQ(group_->Workers().size(), static_cast<size_t>(fault.dp));
  EXPECT_EQ(group_->CountPartialResults(), 0);
  running_.clear();
  waiting_.clear();
  ExpectEndsCleanly(*group_);
}

// Faults() is called by InitGoogleTest.
INSTANTIATE_TEST_SUITE_P(Chaos, RankFault, testing::ValuesIn(Faults()),
                         [](const auto& info) { return NameOf(info.param); });

class Chaos : public testing::Test {
 protected:
  static std::unique_ptr<grpc::ClientContext> NewContext() {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_wait_for_ready(true);
    context->set_deadline(absl::ToChronoTime(absl::Now() + kCallTimeout));
    return context;
  }
  static v1::Job Submit(v1::VideoGeneration::Stub& stub, v1::GenerateRequest request,
                        const std::string& id) {
    request.set_request_id(id);
    v1::Job job;
    const grpc::Status status = stub.SubmitJob(NewContext().get(), request, &job);
    EXPECT_TRUE(status.ok()) << id << ": " << status.error_message();
    return job;
  }
  static v1::Job WaitEnd(v1::VideoGeneration::Stub& stub, const std::string& id) {
    v1::WatchJobRequest request;
    request.set_id(id);
    const auto context = NewContext();
    const auto reader = stub.WatchJob(context.get(), request);
    v1::Job job;
    for (v1::GenerateEvent event; reader->Read(&event);) {
      if (event.has_job()) job = event.job();
    }
    const grpc::Status status = reader->Finish();
    EXPECT_TRUE(status.ok()) << id << ": " << status.error_message();
    return job;
  }
  static bool WaitGone(const std::vector<pid_t>& pids) {
    for (const absl::Time end = absl::Now() + absl::Seconds(10); absl::Now() < end;) {
      if (std::none_of(pids.begin(), pids.end(), [](pid_t pid) { return kill(pid, 0) == 0; })) {
        return true;
      }
    }
    return false;
  }
};

class FrontendKill : public Chaos, public testing::WithParamInterface<Phase> {};

TEST_P(FrontendKill, QueuedJobsRunAfterTheRestartRunningOnesHaveFailedAndNothingIsLeft) {
  const std::unique_ptr<ServedGroup> group = Serve({.dp = 2});
  ASSERT_NE(group, nullptr);
  const std::string place = GetParam().place;
  group->Arm(place, "hold");
  auto stub = v1::VideoGeneration::NewStub(group->channel());
  for (const char* id : {"running-0", "running-1"}) Submit(*stub, Request(1), id);
  for (int rank = 0; rank < 2; ++rank) ASSERT_GT(group->WaitReached(place, rank), 0);
  const absl::Time end = absl::Now() + kCallTimeout;
  while (place == "chunk" && group->CountPartialResults() < 2 && absl::Now() < end) {
  }
  for (const char* id : {"queued-0", "queued-1", "queued-2"}) {
    EXPECT_EQ(Submit(*stub, Request(2), id).state(), v1::JOB_STATE_QUEUED);
  }
  std::vector<pid_t> workers;
  for (const auto& [rank, pid] : group->Workers()) workers.push_back(pid);
  ASSERT_EQ(workers.size(), 2u);
  // An end is recorded, too, before it is told.
  group->Kill();
  EXPECT_TRUE(WaitGone(workers));
  group->Disarm(place);

  const absl::Time restarted = absl::Now();
  ASSERT_TRUE(group->Start().ok()) << group->Log();
  EXPECT_TRUE(group->WaitServing(true, kServingAgainMax));
  Report(absl::StrCat("FrontendKill", GetParam().name), absl::Now() - restarted);
  stub = v1::VideoGeneration::NewStub(group->channel());
  for (const char* id : {"running-0", "running-1"}) {
    const v1::Job job = WaitEnd(*stub, id);
    EXPECT_EQ(job.state(), v1::JOB_STATE_FAILED);
    EXPECT_EQ(job.failure().code(), StatusCode::UNAVAILABLE);
    EXPECT_EQ(job.failure().reason(), "SERVER_RESTARTED");
  }
  for (const char* id : {"queued-0", "queued-1", "queued-2"}) {
    EXPECT_EQ(WaitEnd(*stub, id).state(), v1::JOB_STATE_SUCCEEDED);
  }
  EXPECT_EQ(group->CountPartialResults(), 0);
  ExpectEndsCleanly(*group);
}

INSTANTIATE_TEST_SUITE_P(Chaos, FrontendKill, testing::Values(kDenoising, kSending),
                         [](const auto& info) { return info.param.name; });

class LinkFault : public Chaos, public testing::WithParamInterface<const char*> {};

// The worker finds its link gone and exits with 3.
TEST_P(LinkFault, EndsTheRequestOfItsRankAndTheRankComesBack) {
  const std::unique_ptr<ServedGroup> group = Serve({.dp = 2});
  ASSERT_NE(group, nullptr);
  group->Arm("denoising", "hold");
  const Calls running = Send(*group, 2);
  for (int rank = 0; rank < 2; ++rank) ASSERT_GT(group->WaitReached("denoising", rank), 0);
  const pid_t victim = group->WaitReached("denoising", 1);
  const Calls waiting = Send(*group, 2);
  for (const auto& call : waiting) ASSERT_TRUE(call->ReadUntilState(v1::JOB_STATE_QUEUED));
  group->Arm("step", GetParam(), 1);
  const absl::Time struck = absl::Now();
  group->Disarm("denoising");
  ASSERT_TRUE(WaitGone({victim})) << group->Log();
  group->Disarm("step", 1);
  ASSERT_GT(group->WaitReached("ready", 1, victim), 0) << group->Log();
  Report(absl::StrCat("link: ", GetParam()), absl::Now() - struck);
  EXPECT_LT(absl::Now() - struck, kServingAgainMax);
  int lost = 0;
  for (const auto& call : running) {
    const grpc::Status status = call->Finish();
    if (status.ok()) continue;
    ++lost;
    EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE) << status.error_message();
    const auto info = Detail<google::rpc::ErrorInfo>(status);
    EXPECT_EQ(info.reason(), "RANK_LOST");
    EXPECT_EQ(info.metadata().at("rank"), "1");
    EXPECT_EQ(info.metadata().at("exit_code"), "3");
  }
  EXPECT_EQ(lost, 1);
  ExpectAllWhole(waiting);
  ExpectEndsCleanly(*group);
}

INSTANTIATE_TEST_SUITE_P(Chaos, LinkFault, testing::Values("cut", "garbage"),
                         [](const auto& info) { return std::string(info.param); });

TEST_F(Chaos, ACorruptResultFailsItsJobAndTheRankServesOn) {
  const std::unique_ptr<ServedGroup> group = Serve({.dp = 1});
  ASSERT_NE(group, nullptr);
  const pid_t worker = group->Workers()[0];
  const struct {
    const char* place;
    const char* action;
    StatusCode code;  // OK: it does no harm
    const char* reason;
  } kRows[] = {{"chunk", "offset", StatusCode::INTERNAL, "RESULT_INCOMPLETE"},
               {"chunk", "drop", StatusCode::INTERNAL, "RESULT_INCOMPLETE"},
               {"chunk", "twice", StatusCode::INTERNAL, "RESULT_INCOMPLETE"},
               {"chunk", "foreign", StatusCode::INTERNAL, "RESULT_INCOMPLETE"},
               {"chunk", "flip", StatusCode::DATA_LOSS, "RESULT_CORRUPT"},
               {"finished", "size", StatusCode::INTERNAL, "RESULT_INCOMPLETE"},
               {"finished", "sha256", StatusCode::DATA_LOSS, "RESULT_CORRUPT"},
               {"finished", "twice", StatusCode::OK, ""}};
  for (const auto& row : kRows) {
    group->Arm(row.place, row.action);
    TestCall call(group->channel(), Request(1), kCallTimeout);
    const grpc::Status status = call.Finish();
    EXPECT_EQ(status.error_code(), row.code) << row.place << " " << row.action;
    if (!status.ok()) {
      EXPECT_EQ(Detail<google::rpc::ErrorInfo>(status).reason(), row.reason) << row.action;
    }
    group->Disarm(row.place);
    TestCall good(group->channel(), Request(2), kCallTimeout);
    ExpectWhole(good);
    EXPECT_EQ(group->CountPartialResults(), 0) << row.action;
    EXPECT_EQ(group->Workers()[0], worker) << row.action;
  }
  ExpectEndsCleanly(*group);
}

TEST_F(Chaos, ARankThatNeverEndsItsResultIsReplaced) {
  const std::unique_ptr<ServedGroup> group =
      Serve({.dp = 1, .arguments = {"--wave-stall-timeout=3s"}});
  ASSERT_NE(group, nullptr);
  const pid_t victim = group->Workers()[0];
  group->Arm("finished", "drop");
  TestCall call(group->channel(), Request(1), kCallTimeout);
  TestCall waiting(group->channel(), Request(2), kCallTimeout);
  const grpc::Status status = call.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  const auto info = Detail<google::rpc::ErrorInfo>(status);
  EXPECT_EQ(info.reason(), "WAVE_DEADLINE");
  EXPECT_EQ(info.metadata().at("rank"), "0");
  group->Disarm("finished");
  EXPECT_GT(group->WaitReached("ready", 0, victim), 0);
  ExpectWhole(waiting);
  EXPECT_EQ(group->CountPartialResults(), 0);
  ExpectEndsCleanly(*group);
}

// A disk of two MiB, or where none can be mounted the kernel's limit on the size of a file.
class SmallDisk {
 public:
  explicit SmallDisk(const std::filesystem::path& path) : path_(path) {
    std::filesystem::create_directories(path_);
    mounted_ = mount("tmpfs", path_.c_str(), "tmpfs", 0, "size=2m") == 0;
  }
  ~SmallDisk() {
    if (mounted_) umount2(path_.c_str(), MNT_DETACH);
  }
  void LimitUnlessMounted(pid_t pid) const {
    rlimit limit = {.rlim_cur = 2 << 20, .rlim_max = RLIM_INFINITY};
    if (!mounted_) prlimit(pid, RLIMIT_FSIZE, &limit, nullptr);
  }

 private:
  const std::filesystem::path path_;
  bool mounted_ = false;
};

TEST_F(Chaos, AFullDiskFailsTheJobAndHarmsNobody) {
  std::string folder = (std::filesystem::temp_directory_path() / "dlo-disk-XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  {
    const SmallDisk disk(folder);
    const std::unique_ptr<ServedGroup> group = Serve({.dp = 1, .data_dir = folder});
    ASSERT_NE(group, nullptr);
    disk.LimitUnlessMounted(group->serve_pid());
    const pid_t worker = group->Workers()[0];
    // 17 frames of 128x128: 3.3 MB.
    TestCall call(group->channel(), Request(1, 128, 17), kCallTimeout);
    TestCall waiting(group->channel(), Request(2), kCallTimeout);
    const grpc::Status status = call.Finish();
    EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
    EXPECT_EQ(Detail<google::rpc::ErrorInfo>(status).reason(), "DISK_FULL");
    ExpectWhole(waiting);
    EXPECT_EQ(group->CountPartialResults(), 0);
    EXPECT_EQ(group->Workers()[0], worker);
    ExpectEndsCleanly(*group);
  }
  std::filesystem::remove_all(folder);
}

TEST_F(Chaos, ClientsThatNeverReadHoldBackNeitherRanksNorOthersNorMemory) {
  const std::unique_ptr<ServedGroup> group = Serve({.dp = 1});
  ASSERT_NE(group, nullptr);
  auto stub = v1::VideoGeneration::NewStub(group->channel());
  {
    TestCall warm_up(group->channel(), Request(1), kCallTimeout);
    ExpectWhole(warm_up);
  }
  const ProcessMemory before = MemoryOf(group->serve_pid());
  // Three results of 16 MB each.
  Calls deaf;
  for (const char* id : {"a", "b", "c"}) {
    v1::GenerateRequest request = Request(1, 128, 81);
    request.set_request_id(id);
    request.mutable_settings()->set_num_inference_steps(1);
    deaf.push_back(std::make_unique<TestCall>(group->channel(), request, kCallTimeout));
  }
  for (const auto& call : deaf) ASSERT_TRUE(call->ReadUntilState(v1::JOB_STATE_QUEUED));
  int64_t result_bytes = 0;
  for (const char* id : {"a", "b", "c"}) {
    const v1::Job job = WaitEnd(*stub, id);
    EXPECT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED);
    result_bytes += job.result().size_bytes();
  }
  EXPECT_GT(result_bytes, 40 << 20);
  for (int i = 0; i < 3; ++i) {
    TestCall other(group->channel(), Request(i), kCallTimeout);
    ExpectWhole(other);
  }
  const ProcessMemory after = MemoryOf(group->serve_pid());
  std::cout << "[ memory   ] dlo-serve: " << (before.rss_bytes >> 20) << " MiB before, "
            << (after.rss_bytes >> 20) << " MiB while three clients do not read "
            << (result_bytes >> 20) << " MiB" << std::endl;
  // The result queue may hold 16 MiB of it on the way to the disk.
  EXPECT_LT(after.rss_bytes - before.rss_bytes, 32 << 20);
  // They can still have it.
  ExpectAllWhole(deaf);
  deaf.clear();
  ExpectEndsCleanly(*group);
}

}  // namespace
}  // namespace dlo

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (strcmp(argv[i], "--long") == 0) dlo::run_all = true;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
