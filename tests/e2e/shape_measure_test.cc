#include "tests/e2e/shape_measure.h"

#include <vector>

#include "gtest/gtest.h"

namespace dlo {
namespace {

constexpr int kFrames = 9, kHeight = 48, kWidth = 64;

struct Clip {
  float color[3] = {0.9f, 0.1f, 0.1f};
  float background[3] = {0.02f, 0.02f, 0.02f};
  double x = 32, y = 24, dx = 0, dy = 0;  // centre in pixels, pixels a frame
  double radius = 8, growth = 0;          // pixels, pixels a frame
};

ShapeMeasure MeasureDisc(const Clip& clip) {
  std::vector<float> rgb;
  for (int t = 0; t < kFrames; ++t) {
    for (int y = 0; y < kHeight; ++y) {
      for (int x = 0; x < kWidth; ++x) {
        const double px = x - clip.x - clip.dx * t, py = y - clip.y - clip.dy * t;
        const double r = clip.radius + clip.growth * t;
        const float* color = px * px + py * py < r * r ? clip.color : clip.background;
        rgb.insert(rgb.end(), color, color + 3);
      }
    }
  }
  return MeasureShape(rgb, kFrames, kHeight, kWidth);
}

TEST(MeasureShape, NamesColors) {
  Clip clip{.color = {0.98f, 0.55f, 0.08f}, .background = {0.05f, 0.06f, 0.33f}};
  EXPECT_EQ(MeasureDisc(clip).color, "orange");
  EXPECT_EQ(MeasureDisc(clip).background, "dark blue");
  clip = {.color = {0.16f, 0.75f, 0.24f}, .background = {0.96f, 0.96f, 0.96f}};
  EXPECT_EQ(MeasureDisc(clip).color, "green");
  EXPECT_EQ(MeasureDisc(clip).background, "white");
}

TEST(MeasureShape, TellsDirections) {
  EXPECT_EQ(MeasureDisc({.x = 16, .dx = 3}).motion, "right");
  EXPECT_EQ(MeasureDisc({.x = 48, .dx = -3}).motion, "left");
  EXPECT_EQ(MeasureDisc({.y = 12, .dy = 2}).motion, "down");
  EXPECT_EQ(MeasureDisc({.y = 36, .dy = -2}).motion, "up");
  EXPECT_EQ(MeasureDisc({.x = 48, .y = 12, .dx = -2, .dy = 2}).motion, "down left");
  EXPECT_NEAR(MeasureDisc({.x = 16, .dx = 3}).dx, 24.0 / kWidth, 0.01);
}

TEST(MeasureShape, TellsGrowthFromStillness) {
  EXPECT_EQ(MeasureDisc({.radius = 6, .growth = 0.8}).motion, "growing");
  EXPECT_EQ(MeasureDisc({.radius = 14, .growth = -1}).motion, "shrinking");
  EXPECT_EQ(MeasureDisc({}).motion, "still");
}

TEST(MeasureShape, SeesNothingInAnEmptyFrame) {
  EXPECT_EQ(MeasureDisc({.radius = 0}).color, "");
  EXPECT_EQ(MeasureDisc({.radius = 10, .growth = -2}).motion, "");
}

}  // namespace
}  // namespace dlo
