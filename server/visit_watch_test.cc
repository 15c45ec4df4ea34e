#include "server/visit_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace dlo {
namespace {

using testing::HasSubstr;

constexpr VisitWatchOptions kOptions = {.factor = 10, .floor = absl::Seconds(30)};
constexpr v1::JobState kText = v1::JOB_STATE_ENCODING_TEXT;
constexpr v1::JobState kDenoise = v1::JOB_STATE_DENOISING;

// A domain on a clock of its own: heartbeats of all ranks, each second.
class Domain {
 public:
  explicit Domain(int ranks, VisitWatchOptions options = kOptions)
      : watch_(options, Numbers(ranks)), places_(ranks) {}

  VisitPlace& place(int rank) { return places_[rank]; }
  void Begin(uint64_t wave, v1::JobState stage) {
    for (VisitPlace& place : places_) place = {.wave = wave, .stage = stage};
    Tick();
  }
  // All ranks go on by `visits` and, each `visits_per_step`, a step.
  void Walk(int64_t visits, int64_t visits_per_step) {
    for (VisitPlace& place : places_) {
      place.visit += visits;
      place.step = static_cast<int>(place.visit / visits_per_step);
    }
  }
  std::optional<StuckVisit> Tick(absl::Duration time = absl::Seconds(1)) {
    now_ += time;
    for (size_t rank = 0; rank < places_.size(); ++rank) {
      watch_.Note(static_cast<int>(rank), places_[rank], now_);
    }
    return watch_.Find(now_);
  }
  // Seconds of heartbeats without change until somebody is stuck; -1: nobody within `max`.
  int Wait(int max) {
    for (int second = 1; second <= max; ++second) {
      if ((stuck = Tick())) return second;
    }
    return -1;
  }

  std::optional<StuckVisit> stuck;

 private:
  static std::vector<int> Numbers(int ranks) {
    std::vector<int> all;
    for (int rank = 0; rank < ranks; ++rank) all.push_back(rank);
    return all;
  }

  absl::Time now_ = absl::UnixEpoch();
  VisitWatch watch_;
  std::vector<VisitPlace> places_;
};

struct Case {
  const char* name;
  absl::Duration visit_time;  // a heartbeat each, or several visits in one
  int64_t visits_per_heartbeat;
  double factor;
  int stuck_after;  // seconds; -1: never
};

class VisitWatchTest : public testing::TestWithParam<Case> {};

TEST_P(VisitWatchTest, ARankIsStuckAfterTheFloorAndTheFactorTimesTheMedian) {
  const Case& c = GetParam();
  Domain domain(2, {.factor = c.factor, .floor = absl::Seconds(30)});
  domain.Begin(1, kDenoise);
  for (int i = 0; i < 100; ++i) {
    domain.Walk(c.visits_per_heartbeat, 20);
    EXPECT_EQ(domain.Tick(c.visit_time * c.visits_per_heartbeat), std::nullopt);
  }
  EXPECT_EQ(domain.Wait(10'000), c.stuck_after);
}

INSTANTIATE_TEST_SUITE_P(
    All, VisitWatchTest,
    testing::Values(Case{"FastVisitsWaitForTheFloor", absl::Milliseconds(10), 100, 10, 30},
                    Case{"SlowVisitsForTheFactor", absl::Seconds(8), 1, 10, 80},
                    Case{"AFactorBelowThePausesCountsForNothing", absl::Seconds(40), 1, 1, 120},
                    Case{"AFactorOfZeroTurnsItOff", absl::Milliseconds(10), 100, 0, -1}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(VisitWatchTest, TheLaggingRankIsNamedByItsVisit) {
  Domain domain(3);
  domain.Begin(4, kDenoise);
  for (int i = 0; i < 50; ++i) {
    domain.Walk(1, 10);
    domain.Tick();
  }
  // Rank 1 stops; the others run on into the slots that are left, a little later.
  domain.place(0).visit += 2;
  domain.Tick();
  domain.place(2).visit += 2;
  EXPECT_EQ(domain.Wait(1000), 29);
  EXPECT_EQ(domain.stuck->rank, 1);
  EXPECT_EQ(
      domain.stuck->cause,
      "got no further than visit 50 (denoise, after step 5) for 30s, where the median visit takes "
      "1s; rank 0 is at visit 52, rank 2 is at visit 52");
}

TEST(VisitWatchTest, AmongEqualVisitsTheOneThatStoppedFirstIsNamed) {
  Domain domain(2);
  domain.Begin(4, kDenoise);
  for (int i = 0; i < 50; ++i) {
    domain.Walk(1, 10);
    domain.Tick();
  }
  domain.place(1).visit += 1;
  domain.Tick();
  domain.place(0).visit += 1;
  EXPECT_EQ(domain.Wait(1000), 30);
  EXPECT_EQ(domain.stuck->rank, 1);
}

TEST(VisitWatchTest, ASlowRankThatGoesOnIsNotStuck) {
  Domain domain(2);
  domain.Begin(1, kDenoise);
  for (int i = 0; i < 50; ++i) {
    domain.Walk(1, 10);
    domain.Tick();
  }
  // Rank 1 is far ahead and waits; rank 0 goes on, ever so slowly.
  domain.place(1).visit += 100;
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(domain.Wait(29), -1);
    domain.place(0).visit += 1;
    EXPECT_EQ(domain.Tick(), std::nullopt);
  }
}

TEST(VisitWatchTest, AHostThatRunsAheadOfItsDeviceIsNotStuckInALongStep) {
  Domain domain(1);
  domain.Begin(1, kDenoise);
  for (int step = 1; step <= 10; ++step) {
    // 40 visits are enqueued at once, then the host waits for the device.
    domain.place(0).visit += 20;
    EXPECT_EQ(domain.Tick(), std::nullopt);
    domain.place(0).visit += 20;
    EXPECT_EQ(domain.Tick(), std::nullopt);
    EXPECT_EQ(domain.Wait(600), -1) << step;
    domain.place(0).step = step;
  }
  // It is found out in the end.
  EXPECT_EQ(domain.Wait(10'000), 3 * 601 - 600);
}

TEST(VisitWatchTest, NothingIsJudgedBeforeTwoSteps) {
  Domain domain(1);
  domain.Begin(1, kDenoise);
  for (int i = 0; i < 19; ++i) {
    domain.Walk(1, 10);
    domain.Tick();
  }
  EXPECT_EQ(domain.Wait(3000), -1);
}

TEST(VisitWatchTest, EachWaveAndStageHasItsOwnMedian) {
  Domain domain(1);
  domain.Begin(1, kText);
  for (int i = 0; i < 24; ++i) {
    domain.Walk(1, 1000);
    EXPECT_EQ(domain.Tick(absl::Milliseconds(100)), std::nullopt);
  }
  domain.place(0).stage = kDenoise;
  // The first visits of another stage take as long as they take.
  domain.Tick();
  EXPECT_EQ(domain.Wait(3000), -1);
  for (int i = 0; i < 100; ++i) {
    domain.Walk(1, 10);
    domain.Tick(absl::Milliseconds(100));
  }
  domain.Begin(2, kDenoise);
  EXPECT_EQ(domain.Wait(3000), -1);
}

TEST(VisitWatchTest, StagesWithoutVisitsAndIdleRanksAreNotJudged) {
  Domain domain(2);
  domain.Begin(1, kDenoise);
  for (int i = 0; i < 100; ++i) {
    domain.Walk(1, 10);
    domain.Tick();
  }
  domain.place(0).stage = v1::JOB_STATE_DECODING;
  domain.place(1) = {};
  EXPECT_EQ(domain.Wait(3000), -1);
  domain.place(0) = {};
  EXPECT_EQ(domain.Wait(3000), -1);
}

TEST(VisitWatchTest, WithoutStreamingThereAreNoVisits) {
  Domain domain(1);
  domain.Begin(1, kDenoise);
  for (int step = 1; step < 20; ++step) {
    domain.place(0).step = step;
    EXPECT_EQ(domain.Tick(), std::nullopt);
  }
  EXPECT_EQ(domain.Wait(3000), -1);
}

TEST(VisitWatchTest, AWalkerThatIsBehindIsBlamedToo) {
  Domain domain(2);
  domain.Begin(1, kDenoise);
  for (int i = 0; i < 100; ++i) {
    domain.Walk(1, 10);
    domain.Tick();
  }
  // It has no stages.
  domain.place(1).stage = v1::JOB_STATE_UNSPECIFIED;
  domain.place(0).visit += 1;
  EXPECT_GT(domain.Wait(1000), 0);
  EXPECT_EQ(domain.stuck->rank, 1);
  EXPECT_THAT(domain.stuck->cause, HasSubstr("rank 0 is at visit 101"));
}

TEST(VisitWatchTest, ARankThatIsStuckInTheStageBeforeIsBlamed) {
  Domain domain(2);
  domain.Begin(1, kText);
  for (int i = 0; i < 24; ++i) {
    domain.Walk(1, 1000);
    domain.Tick();
  }
  domain.place(0).visit += 1;
  domain.Tick();
  domain.place(0).visit += 1;
  EXPECT_GT(domain.Wait(1000), 0);
  EXPECT_EQ(domain.stuck->rank, 1);
  // Had rank 0 come to the next stage meanwhile, its visits would be measured: none yet.
  domain.place(0).stage = kDenoise;
  EXPECT_EQ(domain.Wait(1000), -1);
}

}  // namespace
}  // namespace dlo
