// What the flight recorders say of a loss, and stuck visits, on real (scripted) worker processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/testing/frontend_harness.h"

namespace dlo {
namespace {

using grpc::StatusCode;
using testing::AllOf;
using testing::HasSubstr;

class LossTest : public testing::Test {
 protected:
  LossTest() {
    harness_.options().domains = JoinedReplicas(2);
    harness_.options().scheduler.max_wait = absl::Seconds(20);
    harness_.options().supervisor.kill_grace = absl::Milliseconds(500);
  }

  // Brings a wave of two to where each rank holds: `places[r]` is "hold_visit=6" or the like, with
  // more words behind it.
  std::vector<std::unique_ptr<TestCall>> Hold(const std::vector<std::string>& places,
                                              const std::string& words) {
    std::vector<std::unique_ptr<TestCall>> calls;
    for (size_t rank = 0; rank < places.size(); ++rank) {
      calls.push_back(std::make_unique<TestCall>(
          harness_.channel(),
          FrontendHarness::Request(absl::StrCat(places[rank], ":", Never(rank), " ", words))));
      // The next one is behind it in the queue.
      EXPECT_TRUE(calls.back()->ReadUntilState(v1::JOB_STATE_QUEUED));
    }
    const absl::Time end = absl::Now() + kTestTimeout;
    for (size_t rank = 0; rank < places.size(); ++rank) {
      while (!std::filesystem::exists(Never(rank) + ".held") && absl::Now() < end) {
        absl::SleepFor(absl::Milliseconds(2));
      }
      EXPECT_TRUE(std::filesystem::exists(Never(rank) + ".held")) << rank;
    }
    return calls;
  }
  std::string Never(size_t rank) const { return harness_.Path(absl::StrCat("never", rank)); }

  static google::rpc::ErrorInfo LossOf(TestCall& call) {
    const grpc::Status status = call.Finish();
    EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE) << status.error_message();
    return Detail<google::rpc::ErrorInfo>(status);
  }

  static std::string ReadFile(const std::string& path) {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }

  FrontendHarness harness_;
};

TEST_F(LossTest, OfAKilledRankTheReportSaysWhereItWasAndWhereTheOtherWas) {
  harness_.Start();
  auto calls = Hold({"hold_visit=6", "hold_visit=6"}, "visits=4");
  ASSERT_EQ(kill(FrontendHarness::WorkerPid(1), SIGKILL), 0);
  for (auto& call : calls) {
    const google::rpc::ErrorInfo info = LossOf(*call);
    EXPECT_EQ(info.reason(), "RANK_LOST");
    EXPECT_EQ(info.metadata().at("rank"), "1");
    EXPECT_EQ(
        info.metadata().at("verdict"),
        "rank 1 was killed by signal 9 (Killed): rank 1 was in visit 6 (wave 1, denoise, step "
        "2, visit 6) after AllGather #6 of weights/0; rank 0 was in visit 6 (wave 1, denoise, "
        "step 2, visit 6) after AllGather #6 of weights/0");
    const std::string report = ReadFile(info.metadata().at("report"));
    EXPECT_THAT(report, AllOf(HasSubstr("To blame: rank 1"), HasSubstr("loading"),
                              HasSubstr("AllGather #1 of weights/0"), HasSubstr("step 1"),
                              HasSubstr("rank 0  ")));
  }
  ASSERT_TRUE(harness_.WaitServing(true));
}

TEST_F(LossTest, AStoppedRankIsToBlameWhateverTheOthersWaitFor) {
  harness_.options().supervisor.heartbeat_timeout = absl::Milliseconds(1500);
  harness_.Start();
  auto calls = Hold({"hold_gather=7", "hold_visit=6"}, "visits=4");
  ASSERT_EQ(kill(FrontendHarness::WorkerPid(1), SIGSTOP), 0);
  const google::rpc::ErrorInfo info = LossOf(*calls[0]);
  EXPECT_EQ(info.metadata().at("rank"), "1");
  EXPECT_THAT(info.metadata().at("verdict"),
              AllOf(HasSubstr("rank 1 was not heard of for 1.5s: rank 1 was in visit 6"),
                    HasSubstr("rank 0 was in AllGather #7 of weights/0")));
}

TEST_F(LossTest, TheBlameGoesToTheRankThatDidNotComeToTheCollective) {
  // Rank 0 makes no progress first, because it waits for rank 1, which is slower to its end.
  harness_.options().scheduler.wave_limits.stall_timeout = absl::Milliseconds(1500);
  harness_.Start();
  auto calls = Hold({"hold_gather=7", "visit_ms=150 hold_visit=6"}, "visits=4");
  const google::rpc::ErrorInfo info = LossOf(*calls[0]);
  EXPECT_EQ(info.reason(), "WAVE_DEADLINE");
  EXPECT_EQ(info.metadata().at("rank"), "1");
  EXPECT_THAT(info.metadata().at("verdict"),
              HasSubstr("rank 1 did not come to AllGather #7 of weights/0, in which rank 0 waited "
                        "(rank 0 made no progress for 1.5s"));
}

TEST_F(LossTest, ARankThatIsAliveAndStuckInAVisitIsNamedByItsVisit) {
  harness_.options().supervisor.visits = {.factor = 5, .floor = absl::Milliseconds(700)};
  harness_.Start();
  auto calls = Hold({"hold_gather=19", "hold_visit=18"}, "visits=5 visit_ms=30");
  TestCall queued(harness_.channel(), FrontendHarness::Request("x"));
  TestCall queued_too(harness_.channel(), FrontendHarness::Request("x"));
  const grpc::Status status = calls[1]->Finish();
  const auto info = Detail<google::rpc::ErrorInfo>(status);
  EXPECT_EQ(info.reason(), "STUCK_VISIT");
  EXPECT_EQ(info.metadata().at("rank"), "1");
  EXPECT_THAT(status.error_message(),
              AllOf(HasSubstr("the worker of rank 1 got no further than visit 17 (denoise, after "
                              "step 3) for "),
                    HasSubstr("rank 0 is at visit 18")));
  EXPECT_THAT(info.metadata().at("verdict"),
              AllOf(HasSubstr("rank 1 was in visit 18"),
                    HasSubstr("rank 0 was in AllGather #19 of weights/0")));
  EXPECT_TRUE(queued.Finish().ok());
  EXPECT_TRUE(queued_too.Finish().ok());
}

TEST_F(LossTest, SlowVisitsOfALiveRankTripNothing) {
  harness_.options().supervisor.visits = {.factor = 5, .floor = absl::Milliseconds(700)};
  harness_.options().domains = IndependentReplicas(1);
  harness_.Start();
  // Fast ones, then each as long as the floor.
  TestCall fast(harness_.channel(), FrontendHarness::Request("visits=20 visit_ms=10"));
  TestCall slow(harness_.channel(), FrontendHarness::Request("visits=1 visit_ms=800"));
  EXPECT_TRUE(fast.Finish().ok());
  EXPECT_TRUE(slow.Finish().ok());
}

}  // namespace
}  // namespace dlo
