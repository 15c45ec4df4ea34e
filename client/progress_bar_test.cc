#include "client/progress_bar.h"

#include <sstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dlo {
namespace {

using ::testing::HasSubstr;

ProgressState Denoising(int step) {
  return {.stage = "denoising",
          .step = step,
          .num_steps = 30,
          .step_time = absl::Milliseconds(1320),
          .remaining = absl::Seconds(125)};
}

TEST(HumanDurationTest, Table) {
  EXPECT_EQ(HumanDuration(absl::ZeroDuration()), "0.00 s");
  EXPECT_EQ(HumanDuration(absl::Milliseconds(1324)), "1.32 s");
  EXPECT_EQ(HumanDuration(absl::Milliseconds(9999)), "10 s");
  EXPECT_EQ(HumanDuration(absl::Milliseconds(59'700)), "1 min 00 s");
  EXPECT_EQ(HumanDuration(absl::Seconds(125)), "2 min 05 s");
  EXPECT_EQ(HumanDuration(absl::Minutes(62)), "1 h 02 min");
}

TEST(HumanBytesTest, Table) {
  EXPECT_EQ(HumanBytes(999), "999 B");
  EXPECT_EQ(HumanBytes(15'196), "15 kB");
  EXPECT_EQ(HumanBytes(999'900), "1.0 MB");
  EXPECT_EQ(HumanBytes(1'525'028), "1.5 MB");
  EXPECT_EQ(HumanBytes(2'500'000'000), "2.50 GB");
}

TEST(RenderProgressTest, DropsTheLeastUsefulFirstAsTheTerminalNarrows) {
  const ProgressState state = Denoising(15);
  EXPECT_EQ(RenderProgress(state, 0), "denoising 15/30, 2 min 05 s left, 1.32 s/step");
  EXPECT_EQ(RenderProgress(state, 72),
            "denoising [===========>           ] 15/30, 2 min 05 s left, 1.32 s/step");
  EXPECT_EQ(RenderProgress(state, 60),
            "denoising [=====>     ] 15/30, 2 min 05 s left, 1.32 s/step");
  EXPECT_EQ(RenderProgress(state, 50), "denoising 15/30, 2 min 05 s left, 1.32 s/step");
  EXPECT_EQ(RenderProgress(state, 34), "denoising 15/30, 2 min 05 s left");
  EXPECT_EQ(RenderProgress(state, 30), "denoising [=====>     ] 15/30");
  EXPECT_EQ(RenderProgress(state, 16), "denoising 15/30");
  EXPECT_EQ(RenderProgress(state, 6), "denoi");
  for (int columns = 1; columns < 200; ++columns) {
    EXPECT_LT(RenderProgress(state, columns).size(), static_cast<size_t>(columns));
  }
}

TEST(RenderProgressTest, TheBarIsEmptyAtTheStartAndFullAtTheEnd) {
  EXPECT_THAT(RenderProgress(Denoising(0), 200), HasSubstr("[>" + std::string(39, ' ') + "]"));
  EXPECT_THAT(RenderProgress(Denoising(30), 200), HasSubstr("[" + std::string(40, '=') + "]"));
  EXPECT_THAT(RenderProgress(Denoising(99), 200), HasSubstr("[" + std::string(40, '=') + "]"));
  EXPECT_THAT(RenderProgress(Denoising(-3), 200), HasSubstr("[>" + std::string(39, ' ') + "]"));
}

TEST(RenderProgressTest, StagesWithoutSteps) {
  EXPECT_EQ(RenderProgress({.stage = "decoding"}, 80), "decoding");
  EXPECT_EQ(RenderProgress({.stage = "queued", .queue_position = 3}, 80), "queued, position 3");
  EXPECT_EQ(RenderProgress({.stage = "receiving", .received_bytes = 1'500'000}, 80),
            "receiving 1.5 MB");
}

TEST(ProgressBarTest, RedrawsInPlaceOnATerminalAndLeavesNoTrace) {
  std::ostringstream err;
  int columns = 30;
  const Console console{.err = &err, .columns = [&] { return columns; }};
  {
    ProgressBar bar(console, /*quiet=*/false);
    bar.Update(Denoising(1));
    bar.Update(Denoising(1));
    columns = 16;
    bar.Update(Denoising(2));
    bar.Note("seed 7");
    bar.Update(Denoising(3));
  }
  EXPECT_EQ(err.str(),
            "\rdenoising [>           ] 1/30\x1b[K"
            "\rdenoising 2/30\x1b[K"
            "\r\x1b[Kseed 7\n"
            "\rdenoising 3/30\x1b[K"
            "\r\x1b[K");
}

TEST(ProgressBarTest, PlainLinesElsewhere) {
  std::ostringstream err;
  const Console console{.err = &err};
  ProgressBar bar(console, /*quiet=*/false);
  bar.Update({.stage = "queued", .queue_position = 1});
  bar.Update({.stage = "queued", .queue_position = 1});
  bar.Update(Denoising(1));
  bar.Note("done");
  EXPECT_EQ(err.str(), "queued, position 1\ndenoising 1/30, 2 min 05 s left, 1.32 s/step\ndone\n");
}

TEST(ProgressBarTest, QuietDrawsNothing) {
  std::ostringstream err;
  const Console console{.err = &err, .columns = [] { return 80; }};
  {
    ProgressBar bar(console, /*quiet=*/true);
    bar.Update(Denoising(1));
    bar.Note("done");
  }
  EXPECT_EQ(err.str(), "");
}

}  // namespace
}  // namespace dlo
