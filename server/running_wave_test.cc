#include "server/running_wave.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace dlo {
namespace {

using testing::HasSubstr;

constexpr absl::Time kStart = absl::UnixEpoch();
absl::Time At(absl::Duration after) { return kStart + after; }

RunningWave Wave(int replicas, WaveLimits limits = {}, WaveForecast forecast = {}) {
  return RunningWave(7, std::vector<std::shared_ptr<Job>>(replicas), limits, forecast, kStart);
}

TEST(RunningWaveTest, AVideoOfManyHoursThatMakesProgressIsNeverOverdue) {
  RunningWave wave = Wave(1);
  absl::Time now = kStart;
  wave.NoteStage(0, v1::JOB_STATE_ENCODING_TEXT, now);
  now += absl::Minutes(5);
  wave.NoteStage(0, v1::JOB_STATE_DENOISING, now);
  // 50 steps of nine minutes each.
  for (int step = 1; step <= 50; ++step) {
    now += absl::Minutes(9);
    EXPECT_EQ(wave.FindOverdue(now), std::nullopt);
    EXPECT_EQ(wave.NoteStep(0, step, 50, now), absl::Minutes(9));
  }
  // A decoder that gives a frame every nine minutes, for longer than the denoising took.
  wave.NoteStage(0, v1::JOB_STATE_DECODING, now);
  for (uint64_t frame = 1; frame <= 300; ++frame) {
    now += absl::Minutes(9);
    EXPECT_EQ(wave.FindOverdue(now), std::nullopt);
    wave.NoteCounter(0, frame, now);
  }
  EXPECT_EQ(wave.NextDeadline(), now + absl::Minutes(10));
}

TEST(RunningWaveTest, ARankWithoutProgressIsOverdueAndAHeartbeatIsNone) {
  RunningWave wave = Wave(2);
  wave.NoteCounter(0, 3, At(absl::Minutes(4)));
  wave.NoteCounter(1, 3, At(absl::Minutes(2)));
  // It is alive, and no more than that.
  wave.NoteCounter(1, 3, At(absl::Minutes(11)));
  EXPECT_EQ(wave.NextDeadline(), At(absl::Minutes(12)));
  EXPECT_EQ(wave.FindOverdue(At(absl::Minutes(12)) - absl::Milliseconds(1)), std::nullopt);
  const auto overdue = wave.FindOverdue(At(absl::Minutes(12)));
  ASSERT_TRUE(overdue);
  EXPECT_EQ(overdue->replica, 1);
  EXPECT_THAT(overdue->cause, HasSubstr("no progress for 10m (wave.stall_timeout)"));
}

TEST(RunningWaveTest, WhoHasAnsweredIsNotWaitedFor) {
  RunningWave wave = Wave(2);
  EXPECT_FALSE(wave.answered());
  wave.Answer(1);
  wave.NoteProgress(0, At(absl::Minutes(9)));
  EXPECT_EQ(wave.NextDeadline(), At(absl::Minutes(19)));
  EXPECT_EQ(wave.FindOverdue(At(absl::Minutes(20)))->replica, 0);
  wave.Answer(0);
  EXPECT_TRUE(wave.answered());
  EXPECT_EQ(wave.NextDeadline(), absl::InfiniteFuture());
  EXPECT_EQ(wave.FindOverdue(At(absl::Hours(9))), std::nullopt);
}

struct TotalRow {
  absl::Duration text, step;  // before the first step, and of each
  int num_steps;
  absl::Duration overdue;  // of the wave, after its first step
};

TEST(RunningWaveTest, DenoisingMayTakeFiveTimesWhatItsStepsForetellAndTenMinutesAtLeast) {
  for (const TotalRow& row : {
           TotalRow{absl::Seconds(1), absl::Seconds(1), 10, absl::Seconds(600)},
           TotalRow{absl::Seconds(20), absl::Seconds(10), 10, absl::Seconds(600)},
           TotalRow{absl::Seconds(20), absl::Seconds(11), 10, absl::Seconds(650)},
           TotalRow{absl::Seconds(0), absl::Seconds(144), 50, absl::Hours(10)},
       }) {
    RunningWave wave = Wave(1, {.stall_timeout = absl::Hours(100)});
    wave.NoteStage(0, v1::JOB_STATE_DENOISING, At(row.text));
    EXPECT_EQ(wave.NextDeadline(), At(row.text + absl::Hours(100)));
    wave.NoteStep(0, 1, row.num_steps, At(row.text + row.step));
    EXPECT_EQ(wave.NextDeadline(), At(row.overdue));
    const auto overdue = wave.FindOverdue(At(row.overdue));
    ASSERT_TRUE(overdue);
    EXPECT_THAT(overdue->cause, HasSubstr("still at work after"));
    // A faster step later does not make it stricter.
    wave.NoteStep(0, 2, row.num_steps, At(row.text + row.step));
    EXPECT_EQ(wave.NextDeadline(), At(row.overdue));
    wave.NoteStage(0, v1::JOB_STATE_DECODING, At(row.overdue));
    EXPECT_EQ(wave.FindOverdue(At(row.overdue)), std::nullopt);
  }
}

TEST(RunningWaveTest, AForecastBoundsEveryStage) {
  const WaveLimits patient = {.stall_timeout = absl::Hours(100)};
  const WaveForecast forecast = {.until_decoding = absl::Minutes(8), .decoding = absl::Minutes(2)};
  for (v1::JobState stage : {v1::JOB_STATE_ENCODING_TEXT, v1::JOB_STATE_DECODING}) {
    RunningWave wave = Wave(1, patient, forecast);
    wave.NoteStage(0, stage, At(absl::Minutes(1)));
    EXPECT_EQ(wave.NextDeadline(), At(absl::Minutes(50)));
    EXPECT_EQ(wave.FindOverdue(At(absl::Minutes(49))), std::nullopt);
    const auto overdue = wave.FindOverdue(At(absl::Minutes(50)));
    ASSERT_TRUE(overdue);
    EXPECT_THAT(overdue->cause,
                HasSubstr("still at work after 50m, more than 5 times the predicted 10m"));
  }
}

TEST(RunningWaveTest, TheRequestsOwnStepsOverruleAForecastThatWasTooShort) {
  RunningWave wave = Wave(1, {.stall_timeout = absl::Hours(100)},
                          {.until_decoding = absl::Minutes(8), .decoding = absl::Minutes(2)});
  wave.NoteStage(0, v1::JOB_STATE_DENOISING, At(absl::Minutes(1)));
  wave.NoteStep(0, 1, 10, At(absl::Minutes(4)));  // 31 minutes up to the decoding
  EXPECT_EQ(wave.NextDeadline(), At(5 * absl::Minutes(33)));
  wave.NoteStage(0, v1::JOB_STATE_DECODING, At(absl::Minutes(31)));
  EXPECT_EQ(wave.NextDeadline(), At(5 * absl::Minutes(33)));
}

TEST(RunningWaveTest, AShortForecastStillLeavesTenMinutes) {
  const RunningWave wave =
      Wave(1, {.stall_timeout = absl::Hours(100)}, {.until_decoding = absl::Milliseconds(3)});
  EXPECT_EQ(wave.NextDeadline(), At(absl::Minutes(10)));
}

TEST(RunningWaveTest, WhatOnlyWaitsForItsClientIsNeverTooLong) {
  RunningWave wave = Wave(1, {}, {.until_decoding = absl::Minutes(8)});
  wave.NoteHeldBack(0, At(absl::Minutes(39)));
  EXPECT_EQ(wave.NextDeadline(), At(absl::Minutes(49)));
  wave.NoteHeldBack(0, At(absl::Minutes(48)));
  EXPECT_EQ(wave.FindOverdue(At(absl::Minutes(50))), std::nullopt);
}

}  // namespace
}  // namespace dlo
