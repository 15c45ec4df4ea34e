// Waves of a collective domain, on real (scripted) worker processes: what the members see, and what
// happens when a rank dies, stops or gets nowhere in each phase.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "base/sha256.h"
#include "server/result_file.h"
#include "server/testing/frontend_harness.h"

namespace dlo {
namespace {

using grpc::StatusCode;
using testing::HasSubstr;

void UseJoined(FrontendHarness& harness, int replicas) {
  harness.options().domains = JoinedReplicas(replicas);
  // Long enough for every test's clients to come; a full wave starts at once.
  harness.options().scheduler.max_wait = absl::Seconds(20);
}

using Calls = std::vector<std::unique_ptr<TestCall>>;

Calls Send(FrontendHarness& harness, const std::string& prompt, int count) {
  Calls calls;
  for (int i = 0; i < count; ++i) {
    calls.push_back(
        std::make_unique<TestCall>(harness.channel(), FrontendHarness::Request(prompt)));
  }
  return calls;
}

std::vector<int> RanksOf(const Calls& calls) {
  std::vector<int> ranks;
  for (const auto& call : calls) ranks.push_back(call->last_job().result().ranks(0).rank());
  return ranks;
}

void ExpectAllServed(Calls calls) {
  for (auto& call : calls) {
    const grpc::Status status = call->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
}

std::string ShaOf(const std::string& bytes) {
  Sha256 hash;
  hash.Update(bytes);
  return hash.Finish();
}

TEST(WavesTest, TheMembersOfAWaveGetTheVideosThatTheyWouldGetAlone) {
  const auto request = [](int seed) {
    v1::GenerateRequest r = FrontendHarness::Request("prompt " + std::to_string(seed));
    r.mutable_settings()->set_seed(seed);
    return r;
  };
  std::vector<std::string> videos;
  {
    FrontendHarness joined;
    UseJoined(joined, 4);
    joined.Start();
    Calls calls;
    for (int seed = 0; seed < 4; ++seed) {
      calls.push_back(std::make_unique<TestCall>(joined.channel(), request(seed)));
    }
    for (auto& call : calls) {
      ASSERT_TRUE(call->Finish().ok());
      EXPECT_EQ(call->last_job().result().sha256(), ShaOf(call->video()));
      videos.push_back(call->video());
    }
    EXPECT_THAT(RanksOf(calls), testing::UnorderedElementsAre(0, 1, 2, 3));
  }

  FrontendHarness alone;
  alone.Start();
  for (int seed = 0; seed < 4; ++seed) {
    TestCall call(alone.channel(), request(seed));
    ASSERT_TRUE(call.Finish().ok());
    EXPECT_EQ(call.video(), videos[seed]) << seed;
  }
  EXPECT_NE(videos[0], videos[1]);
}

TEST(WavesTest, AWaveThatIsNotFullRunsAfterTheStableWindow) {
  FrontendHarness harness;
  UseJoined(harness, 3);
  harness.options().scheduler.max_wait = absl::Milliseconds(100);
  harness.Start();
  ExpectAllServed(Send(harness, "x", 1));
  ExpectAllServed(Send(harness, "x", 2));
}

TEST(WavesTest, AMemberThatFailsOrIsCancelledHarmsNobody) {
  FrontendHarness harness;
  UseJoined(harness, 3);
  harness.Start();
  const std::string hold = "hold_step=2:" + harness.Path("go");
  TestCall failing(harness.channel(), FrontendHarness::Request("oom"));
  TestCall cancelled(harness.channel(), FrontendHarness::Request(hold));
  TestCall good(harness.channel(), FrontendHarness::Request(hold));
  ASSERT_TRUE(cancelled.ReadUntilStep(2));
  ASSERT_TRUE(good.ReadUntilStep(2));
  const std::vector<int> workers = FrontendHarness::WorkerPids();
  EXPECT_EQ(Detail<google::rpc::ErrorInfo>(failing.Finish()).reason(), "OUT_OF_MEMORY");
  cancelled.Cancel();
  EXPECT_EQ(cancelled.Finish().error_code(), StatusCode::CANCELLED);
  harness.Touch("go");
  EXPECT_TRUE(good.Finish().ok());
  EXPECT_EQ(good.last_job().result().sha256(), ShaOf(good.video()));
  ExpectAllServed(Send(harness, "x", 3));
  EXPECT_EQ(FrontendHarness::WorkerPids(), workers);
}

TEST(WavesTest, RepliesOfOtherWavesAreDroppedAndCounted) {
  FrontendHarness harness({"--stray"});
  UseJoined(harness, 2);
  harness.Start();
  for (int wave = 0; wave < 3; ++wave) {
    Calls calls = Send(harness, "x", 2);
    for (auto& call : calls) {
      const grpc::Status status = call->Finish();
      EXPECT_TRUE(status.ok()) << status.error_message();
      EXPECT_EQ(call->last_job().result().sha256(), ShaOf(call->video()));
    }
  }
  // Three of other waves twice before each of the six answers.
  EXPECT_EQ(harness.frontend().late_replies(), 6 * 6);
}

enum class Phase { kLoading, kIdle, kText, kDenoising, kDecoding, kSending };

struct PhaseName {
  Phase phase;
  const char* name;
  const char* prompt;  // holds in the phase, where one can
} kPhases[] = {{Phase::kLoading, "Loading", ""},
               {Phase::kIdle, "Idle", ""},
               {Phase::kText, "Text", "hold_text:"},
               {Phase::kDenoising, "Denoising", "hold_step=2:"},
               {Phase::kDecoding, "Decoding", "hold_decode:"},
               {Phase::kSending, "Sending", ""}};

struct Fault {
  int replicas;
  int victim;
  PhaseName phase;
  int signal;
};

std::vector<Fault> Faults() {
  std::vector<Fault> faults;
  for (const PhaseName& phase : kPhases) {
    for (int victim = 0; victim < 3; ++victim) faults.push_back({3, victim, phase, SIGKILL});
    faults.push_back({2, 1, phase, SIGSTOP});
  }
  faults.push_back({4, 3, kPhases[3], SIGKILL});
  faults.push_back({4, 0, kPhases[5], SIGSTOP});
  return faults;
}

// Results that have come in part.
int CountParts(const FrontendHarness& harness) {
  int parts = 0;
  for (const auto& file : std::filesystem::directory_iterator(harness.Path("data/results"))) {
    std::error_code gone;
    const uintmax_t size = file.file_size(gone);
    if (!gone && file.path().extension() == kPartialSuffix && size > 0) ++parts;
  }
  return parts;
}

class WaveFaultTest : public testing::TestWithParam<Fault> {
 protected:
  // Brings all members of a wave into the phase.
  Calls Reach(FrontendHarness& harness, const Fault& fault) {
    Calls calls;
    if (fault.phase.phase == Phase::kLoading) {
      // The victim loads on; it is there as soon as its process is.
      return calls;
    }
    if (fault.phase.phase == Phase::kIdle) {
      EXPECT_TRUE(harness.WaitServing(true));
      return calls;
    }
    if (fault.phase.phase == Phase::kSending) {
      v1::GenerateRequest request = FrontendHarness::Request("big");
      request.mutable_settings()->set_width(128);
      request.mutable_settings()->set_height(128);
      request.mutable_settings()->set_num_frames(128);
      for (int i = 0; i < fault.replicas; ++i) {
        calls.push_back(std::make_unique<TestCall>(harness.channel(), request));
      }
      const absl::Time end = absl::Now() + kTestTimeout;
      while (CountParts(harness) < fault.replicas && absl::Now() < end) {
        absl::SleepFor(absl::Milliseconds(2));
      }
      EXPECT_EQ(CountParts(harness), fault.replicas);
      return calls;
    }
    calls = Send(harness, fault.phase.prompt + harness.Path("never"), fault.replicas);
    for (auto& call : calls) {
      EXPECT_TRUE(call->ReadUntil([&](const v1::GenerateEvent& event) {
        switch (fault.phase.phase) {
          case Phase::kText:
            return event.job().state() == v1::JOB_STATE_ENCODING_TEXT;
          case Phase::kDenoising:
            return event.progress().step() == 2;
          default:
            return event.job().state() == v1::JOB_STATE_DECODING;
        }
      }));
    }
    return calls;
  }
};

TEST_P(WaveFaultTest, EndsItsWaveWithTheRankToBlameAndTheDomainServesAgain) {
  const Fault& fault = GetParam();
  FrontendHarness harness;
  UseJoined(harness, fault.replicas);
  harness.options().supervisor.heartbeat_timeout = absl::Milliseconds(1500);
  harness.options().supervisor.attach_timeout = absl::Milliseconds(1500);
  harness.options().supervisor.kill_grace = absl::Milliseconds(500);
  if (fault.phase.phase == Phase::kSending) {
    harness.options().supervisor.worker_arguments = {"--send-hold=" + harness.Path("never")};
  }
  if (fault.phase.phase == Phase::kLoading) {
    harness.options().supervisor.worker_arguments = {"--load-hold=" + harness.Path("loaded-%r")};
    for (int rank = 0; rank < fault.replicas; ++rank) {
      if (rank != fault.victim) harness.Touch("loaded-" + std::to_string(rank));
    }
  }
  harness.Start();
  Calls running = Reach(harness, fault);
  // These must be kept.
  Calls waiting = Send(harness, "x", fault.replicas);
  for (auto& call : waiting) {
    if (running.empty()) break;  // in an idle domain they would start
    ASSERT_TRUE(call->ReadUntilState(v1::JOB_STATE_QUEUED));
  }
  int pid = -1;
  const absl::Time end = absl::Now() + kTestTimeout;
  while (pid < 0 && absl::Now() < end) pid = FrontendHarness::WorkerPid(fault.victim);
  ASSERT_GT(pid, 0);
  if (fault.phase.phase == Phase::kIdle) {
    ExpectAllServed(std::move(waiting));
    waiting.clear();
  }
  ASSERT_EQ(kill(pid, fault.signal), 0);
  const absl::Time killed = absl::Now();
  for (auto& call : running) {
    const grpc::Status status = call->Finish();
    EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE) << status.error_message();
    const auto info = Detail<google::rpc::ErrorInfo>(status);
    EXPECT_EQ(info.reason(), "RANK_LOST");
    EXPECT_EQ(info.metadata().at("rank"), std::to_string(fault.victim)) << status.error_message();
    if (fault.signal == SIGKILL) {
      EXPECT_EQ(info.metadata().at("signal"), "9");
    } else {
      EXPECT_THAT(status.error_message(), HasSubstr("was not heard of"));
    }
  }
  harness.Touch("loaded-" + std::to_string(fault.victim));
  if (fault.phase.phase == Phase::kIdle) {
    // Requests that are sent before the loss is known may still be given to the dead rank.
    int next = pid;
    while ((next == pid || next < 0) && absl::Now() < end) {
      next = FrontendHarness::WorkerPid(fault.victim);
    }
    waiting = Send(harness, "x", fault.replicas);
  }
  ExpectAllServed(std::move(waiting));
  EXPECT_LT(absl::Now() - killed, absl::Seconds(10));
  ASSERT_TRUE(harness.WaitServing(true));
  EXPECT_EQ(CountParts(harness), 0);
  // That no process is left is checked by the harness.
  EXPECT_THAT(FrontendHarness::WorkerPids(), testing::SizeIs(fault.replicas));
}

INSTANTIATE_TEST_SUITE_P(All, WaveFaultTest, testing::ValuesIn(Faults()), [](const auto& info) {
  const Fault& fault = info.param;
  return std::string(fault.phase.name) + (fault.signal == SIGKILL ? "Kill" : "Stop") +
         std::to_string(fault.victim) + "Of" + std::to_string(fault.replicas);
});

TEST(WavesTest, ANeighbourThatDoesNotEndIsKilledAfterTheGrace) {
  FrontendHarness harness;
  UseJoined(harness, 2);
  harness.options().supervisor.kill_grace = absl::Milliseconds(300);
  harness.Start();
  Calls running = Send(harness, "hold_step=1:" + harness.Path("never"), 2);
  for (auto& call : running) ASSERT_TRUE(call->ReadUntilStep(1));
  Calls waiting = Send(harness, "x", 2);
  for (auto& call : waiting) ASSERT_TRUE(call->ReadUntilState(v1::JOB_STATE_QUEUED));
  const absl::Time start = absl::Now();
  ASSERT_EQ(kill(FrontendHarness::WorkerPid(0), SIGSTOP), 0);
  ASSERT_EQ(kill(FrontendHarness::WorkerPid(1), SIGKILL), 0);
  for (auto& call : running) {
    const auto info = Detail<google::rpc::ErrorInfo>(call->Finish());
    EXPECT_EQ(info.metadata().at("rank"), "1");
  }
  // The clients hear of it at once, the new domain waits for the end of the old one.
  ExpectAllServed(std::move(waiting));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(300));
}

TEST(WavesTest, ARankThatIsAliveAndGetsNowhereIsBlamed) {
  FrontendHarness harness;
  UseJoined(harness, 2);
  harness.options().scheduler.wave_limits.stall_timeout = absl::Milliseconds(500);
  harness.Start();
  TestCall stuck(harness.channel(),
                 FrontendHarness::Request("hold_step=1:" + harness.Path("never")));
  TestCall neighbour(harness.channel(), FrontendHarness::Request("steps_ms=100"));
  ASSERT_TRUE(stuck.ReadUntilStep(1));
  TestCall waiting(harness.channel(), FrontendHarness::Request("x"));
  TestCall waiting_too(harness.channel(), FrontendHarness::Request("x"));
  const grpc::Status status = stuck.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(Detail<google::rpc::ErrorInfo>(status).reason(), "WAVE_DEADLINE");
  EXPECT_THAT(status.error_message(), HasSubstr("made no progress for 500ms"));
  // It had its answer before.
  EXPECT_TRUE(neighbour.Finish().ok());
  EXPECT_TRUE(waiting.Finish().ok());
  EXPECT_TRUE(waiting_too.Finish().ok());
}

// 25 MB, of which the client takes a chunk.
TEST(WavesTest, AClientThatReadsNothingHoldsBackNeitherItsRankNorANeighbour) {
  FrontendHarness harness;
  UseJoined(harness, 2);
  harness.options().links.result_limits = {.messages = 64, .bytes = int64_t{2} << 20};
  harness.Start();
  v1::GenerateRequest request = FrontendHarness::Request("big", "deaf");
  request.mutable_settings()->set_width(128);
  request.mutable_settings()->set_height(128);
  request.mutable_settings()->set_num_frames(128);
  TestCall deaf(harness.channel(), request);
  request.set_request_id("neighbour");
  TestCall neighbour(harness.channel(), request);
  EXPECT_TRUE(neighbour.Finish().ok());
  // The next wave runs, so both ranks have ended this one.
  ExpectAllServed(Send(harness, "x", 2));
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(harness.frontend().result_bytes_waiting(rank), 0);
  const grpc::Status status = deaf.Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(deaf.last_job().result().sha256(), ShaOf(deaf.video()));
}

TEST(WavesTest, ADomainThatCannotStartIsGivenUpAndTheOthersServeOn) {
  FrontendHarness harness;
  harness.options().domains = IndependentReplicas(2);
  harness.options().supervisor.worker_arguments = {"--load-hold=" + harness.Path("loaded-%r")};
  harness.options().supervisor.start_attempts_max = 2;
  harness.Touch("loaded-0");
  harness.Start();
  ASSERT_TRUE(harness.WaitServing(true));
  // Each start of rank 1 is killed while it loads.
  int last = -1;
  int kills = 0;
  for (const absl::Time end = absl::Now() + kTestTimeout; kills < 2 && absl::Now() < end;) {
    const int pid = FrontendHarness::WorkerPid(1);
    if (pid < 0 || pid == last) continue;
    last = pid;
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    ++kills;
  }
  ASSERT_EQ(kills, 2);
  while (FrontendHarness::WorkerPid(1) == last) {
  }
  // Longer than its back-off would be.
  const absl::Time end = absl::Now() + absl::Milliseconds(300);
  while (absl::Now() < end) {
    ASSERT_EQ(FrontendHarness::WorkerPid(1), -1);
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_EQ(harness.Health(), grpc::health::v1::HealthCheckResponse::SERVING);
  ExpectAllServed(Send(harness, "x", 3));
}

}  // namespace
}  // namespace dlo
