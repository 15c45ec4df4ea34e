#include "media/contact_sheet.h"

#include <algorithm>
#include <cstdint>

namespace dlo {

ContactSheetLayout LayOutContactSheet(int num_frames, int frame_width, int frame_height) {
  ContactSheetLayout sheet;
  sheet.frame_width = frame_width;
  sheet.frame_height = frame_height;
  const int n = std::min(num_frames, ContactSheetLayout::kFramesMax);
  for (int i = 0; i < n; ++i) {
    const int intervals = std::max(1, n - 1);
    sheet.frames.push_back(static_cast<int>((int64_t{i} * (num_frames - 1) + intervals / 2) /
                                            intervals));  // rounded to the nearest
  }
  while (sheet.columns * sheet.columns < n) ++sheet.columns;
  sheet.rows = (n + sheet.columns - 1) / sheet.columns;
  return sheet;
}

}  // namespace dlo
