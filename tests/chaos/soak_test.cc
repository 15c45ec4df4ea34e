// Many requests, some cancelled at random moments, with a rank killed again and again: no job is
// lost, no memory grows, nothing is left behind.
//
//   soak_test                                      30 requests, 2 kills
//   soak_test --requests=300 --kill-every=30       the long form (about 2 minutes)
#include <gmock/gmock.h>
#include <grpcpp/client_context.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/sha256.h"
#include "dlo/v1/video_generation.grpc.pb.h"
#include "tests/e2e/served_group.h"

namespace dlo {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(120);
constexpr int kRanks = 2;
constexpr int kClients = 4;
// A process is flat if the most private memory that it had in the second half of its samples is not
// above that of the first by more than this. The first samples, of warming up, do not count. Shared
// pages are left out: whose they are changes with every kill.
constexpr int64_t kServeTolerance = 3 << 20;
constexpr int64_t kWorkerTolerance = 8 << 20;
constexpr size_t kWarmUpSamples = 3;

int num_requests = 30;
int kill_every = 10;
std::string transfer = "none";

std::unique_ptr<grpc::ClientContext> NewContext() {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_wait_for_ready(true);
  context->set_deadline(absl::ToChronoTime(absl::Now() + kCallTimeout));
  return context;
}

struct Outcome {
  std::vector<v1::Job> ends;  // Jobs in a last state that the watcher was told
  bool cancelled = false;     // by us
};

// Submits a job, watches it, and cancels it at its `cancel_at`th event (0: never).
Outcome RunOne(v1::VideoGeneration::Stub& stub, int i, int cancel_at) {
  Outcome outcome;
  v1::GenerateRequest request;
  request.set_request_id(absl::StrCat("job-", i));
  request.set_prompt("a red circle moving right on a black background");
  request.set_output_format(v1::OUTPUT_FORMAT_SAFETENSORS);
  request.mutable_settings()->set_width(32);
  request.mutable_settings()->set_height(32);
  request.mutable_settings()->set_num_frames(5);
  request.mutable_settings()->set_num_inference_steps(4);
  request.mutable_settings()->set_seed(i);
  v1::Job job;
  const grpc::Status submitted = stub.SubmitJob(NewContext().get(), request, &job);
  EXPECT_TRUE(submitted.ok()) << submitted.error_message();
  v1::WatchJobRequest watch;
  watch.set_id(request.request_id());
  const auto context = NewContext();
  const auto reader = stub.WatchJob(context.get(), watch);
  int events = 0;
  for (v1::GenerateEvent event; reader->Read(&event);) {
    if (event.has_job() && event.job().has_expire_time()) outcome.ends.push_back(event.job());
    if (++events != cancel_at) continue;
    v1::CancelJobRequest cancel;
    cancel.set_id(request.request_id());
    EXPECT_TRUE(stub.CancelJob(NewContext().get(), cancel, &job).ok());
    outcome.cancelled = true;
  }
  const grpc::Status status = reader->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  return outcome;
}

void ExpectWholeResult(v1::VideoGeneration::Stub& stub, const v1::Job& job) {
  v1::DownloadResultRequest request;
  request.set_id(job.id());
  const auto context = NewContext();
  const auto reader = stub.DownloadResult(context.get(), request);
  Sha256 hash;
  for (v1::ResultChunk chunk; reader->Read(&chunk);) hash.Update(chunk.data());
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(hash.Finish(), job.result().sha256());
}

// The samples of one process.
class Memory {
 public:
  void Take(pid_t pid) {
    const ProcessMemory memory = MemoryOf(pid);
    if (memory.private_dirty_bytes > 0) samples_.push_back(memory.private_dirty_bytes);
  }

  void ExpectFlat(const std::string& process, int64_t tolerance) const {
    if (samples_.size() < kWarmUpSamples + 4) return;
    const auto begin = samples_.begin() + kWarmUpSamples;
    const auto middle = begin + (samples_.end() - begin) / 2;
    const int64_t first = *std::max_element(begin, middle);
    const int64_t second = *std::max_element(middle, samples_.end());
    EXPECT_LE(second, first + tolerance) << process;
    std::cout << "[ memory   ] " << process << ": private " << first / 1e6 << " MB, then "
              << second / 1e6 << " MB, in " << samples_.size() << " samples" << std::endl;
  }

 private:
  std::vector<int64_t> samples_;
};

int CountResults(const ServedGroup& group) {
  int count = 0;
  for (const auto& file : std::filesystem::directory_iterator(group.data_dir() / "results")) {
    if (file.path().extension() == ".result") ++count;
  }
  return count;
}

// Between calls and connections.
bool WaitOpenFiles(pid_t pid, int count) {
  for (const absl::Time end = absl::Now() + absl::Seconds(10); absl::Now() < end;) {
    if (CountOpenFiles(pid) <= count) return true;
    absl::SleepFor(absl::Milliseconds(20));
  }
  return false;
}

TEST(Soak, NoJobIsLostNoMemoryGrowsAndNothingIsLeft) {
  auto created = ServedGroup::Create({.dp = kRanks, .transfer = transfer});
  ASSERT_TRUE(created.ok()) << created.status();
  ServedGroup& group = **created;
  group.Arm("ready", "note");
  const absl::Status started = group.Start();
  ASSERT_TRUE(started.ok()) << started;
  std::map<int, pid_t> ready;
  for (int rank = 0; rank < kRanks; ++rank) {
    ready[rank] = group.WaitReached("ready", rank);
    ASSERT_GT(ready[rank], 0) << group.Log();
  }
  {
    auto stub = v1::VideoGeneration::NewStub(group.channel());
    RunOne(*stub, num_requests, 0);
  }
  const int open_files_before = CountOpenFiles(group.serve_pid());

  std::atomic<int> next = 0;
  std::atomic<int> done = 0;
  std::vector<Outcome> outcomes(num_requests);
  const absl::Time start = absl::Now();
  std::vector<std::thread> clients;
  for (int c = 0; c < kClients; ++c) {
    clients.emplace_back([&, c] {
      std::minstd_rand random(c + 1);
      auto stub = v1::VideoGeneration::NewStub(group.channel());
      for (int i; (i = next++) < num_requests;) {
        // A fifth, from the first event, in the queue, to the last before the end.
        const int cancel_at = i % 5 == 3 ? static_cast<int>(random() % 8) + 1 : 0;
        outcomes[i] = RunOne(*stub, i, cancel_at);
        ++done;
      }
    });
  }

  Memory serve_memory;
  std::map<pid_t, Memory> worker_memory;
  std::map<pid_t, int> worker_ranks;
  int sampled = 0;
  int kills = 0;
  while (done < num_requests) {
    const int now_done = done;
    if (now_done == sampled) {
      absl::SleepFor(absl::Milliseconds(2));
      continue;
    }
    sampled = now_done;
    serve_memory.Take(group.serve_pid());
    for (const auto& [rank, pid] : group.Workers()) {
      worker_memory[pid].Take(pid);
      worker_ranks[pid] = rank;
    }
    if (now_done < (kills + 1) * kill_every || now_done >= num_requests) continue;
    const int victim = kills++ % kRanks;
    const pid_t pid = ready[victim];
    ASSERT_EQ(kill(pid, SIGKILL), 0) << group.Log();
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank != victim && transfer != "allgather") continue;
      ready[rank] = group.WaitReached("ready", rank, ready[rank]);
      ASSERT_GT(ready[rank], 0) << group.Log();
    }
  }
  for (std::thread& client : clients) client.join();
  const absl::Duration took = absl::Now() - start;

  // Each job has ended once, and stays so.
  auto stub = v1::VideoGeneration::NewStub(group.channel());
  std::map<v1::JobState, int> states;
  int lost = 0;
  for (int i = 0; i < num_requests; ++i) {
    ASSERT_EQ(outcomes[i].ends.size(), 1u) << i;
    const v1::Job& end = outcomes[i].ends[0];
    ++states[end.state()];
    v1::GetJobRequest get;
    get.set_id(absl::StrCat("job-", i));
    v1::Job job;
    EXPECT_TRUE(stub->GetJob(NewContext().get(), get, &job).ok()) << i;
    EXPECT_EQ(job.SerializeAsString(), end.SerializeAsString()) << i;
    switch (end.state()) {
      case v1::JOB_STATE_SUCCEEDED:
        ExpectWholeResult(*stub, end);
        break;
      case v1::JOB_STATE_CANCELLED:
        EXPECT_TRUE(outcomes[i].cancelled) << i;
        break;
      default:
        EXPECT_EQ(end.state(), v1::JOB_STATE_FAILED) << i;
        EXPECT_EQ(end.failure().reason(), "RANK_LOST") << end.failure().message();
        ++lost;
    }
  }
  // A kill ends what its rank ran and, where the others gather its weights, their requests.
  EXPECT_LE(lost, transfer == "allgather" ? kills * kRanks : kills);
  EXPECT_EQ(states[v1::JOB_STATE_SUCCEEDED] + 1, CountResults(group));
  EXPECT_GE(states[v1::JOB_STATE_CANCELLED], num_requests / 10);
  stub.reset();
  EXPECT_TRUE(WaitOpenFiles(group.serve_pid(), open_files_before))
      << open_files_before << " before, " << CountOpenFiles(group.serve_pid()) << " after";

  std::cout << "[ soak     ] " << num_requests << " requests in " << absl::ToDoubleSeconds(took)
            << " s: " << states[v1::JOB_STATE_SUCCEEDED] << " succeeded, "
            << states[v1::JOB_STATE_CANCELLED] << " cancelled, " << lost << " lost to " << kills
            << " kills; " << open_files_before << " open files before, "
            << CountOpenFiles(group.serve_pid()) << " after" << std::endl;
  serve_memory.ExpectFlat("dlo-serve", kServeTolerance);
  for (const auto& [pid, memory] : worker_memory) {
    memory.ExpectFlat(absl::StrCat("worker ", pid, " of rank ", worker_ranks[pid]),
                      kWorkerTolerance);
  }
  const absl::StatusOr<absl::Duration> stopped = group.Stop();
  EXPECT_TRUE(stopped.ok()) << stopped.status();
  EXPECT_EQ(group.Leftovers(), "");
}

}  // namespace
}  // namespace dlo

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    absl::string_view value = argv[i];
    if ((absl::ConsumePrefix(&value, "--requests=") &&
         absl::SimpleAtoi(value, &dlo::num_requests)) ||
        (absl::ConsumePrefix(&value, "--kill-every=") &&
         absl::SimpleAtoi(value, &dlo::kill_every))) {
      continue;
    }
    if (absl::ConsumePrefix(&value, "--transfer=")) {
      dlo::transfer = std::string(value);
      continue;
    }
    std::cerr << "usage: soak_test [--requests=N] [--kill-every=N] [--transfer=NAME]\n";
    return 2;
  }
  return RUN_ALL_TESTS();
}
