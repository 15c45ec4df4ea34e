// Where the frames of a video stand on a contact sheet.
//
//   ContactSheetLayout sheet = LayOutContactSheet(17, 128, 128);
//   sheet.frames;      // {0, 1, 2, ..., 16}: 16 of them
//   sheet.left(5);     // x of the left edge of frame sheet.frames[5]
//
// At most 16 frames, evenly spaced, the first and the last among them, row by row in a grid of
// ceil(sqrt(n)) columns. Between cells is a gap of 2 grey pixels; cells left over at the end are
// grey. Pure.
#pragma once

#include <vector>

namespace dlo {

struct ContactSheetLayout {
  static constexpr int kFramesMax = 16;
  static constexpr int kGap = 2;
  static constexpr unsigned char kGrey = 0x80;

  std::vector<int> frames;  // indices in the video, ascending
  int columns = 0;
  int rows = 0;
  int frame_width = 0;
  int frame_height = 0;

  int width() const { return columns * frame_width + (columns - 1) * kGap; }
  int height() const { return rows * frame_height + (rows - 1) * kGap; }
  int left(int cell) const { return (cell % columns) * (frame_width + kGap); }
  int top(int cell) const { return (cell / columns) * (frame_height + kGap); }
};

// All arguments are positive.
ContactSheetLayout LayOutContactSheet(int num_frames, int frame_width, int frame_height);

}  // namespace dlo
