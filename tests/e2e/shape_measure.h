// What a video of one moving coloured shape shows: the colours' names and the motion, from pixels
// alone.
//
//   ShapeMeasure seen = MeasureShape(video.rgb, 17, 128, 128);
//   EXPECT_EQ(seen.color, "green");
//   EXPECT_EQ(seen.motion, "up");
//
// The rules and tables are those of tools/shapes/evaluate.py, so the same video measures the same
// there. Pure functions.
#pragma once

#include <string>

#include "absl/types/span.h"

namespace dlo {

struct ShapeMeasure {
  std::string background;  // the border's median colour: black, white, gray, dark blue, dark green
  std::string
      color;  // the shape's median colour: red, green, blue, yellow, purple, cyan, white, orange
  std::string motion;  // right, up, "down left", ..., growing, shrinking, still; empty: a frame
                       // without a shape
  double dx =
      0;  // way of the shape's centre from the first to the last frames, in widths, rightwards
  double dy = 0;      // the same in heights, downwards
  double growth = 0;  // area in the last frames over area in the first
};

// `rgb` is [num_frames, height, width, 3] in 0..1 with height and width of at least 8.
ShapeMeasure MeasureShape(absl::Span<const float> rgb, int num_frames, int height, int width);

}  // namespace dlo
