#include <png.h>

#include <algorithm>
#include <csetjmp>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "media/contact_sheet.h"
#include "media/frame_encoder.h"

namespace dlo {
namespace {

// An RGB8 PNG that grows in memory row by row. libpng reports errors by longjmp, so no function
// that calls it may hold a C++ object with a destructor.
class PngStream {
 public:
  PngStream() = default;
  PngStream(const PngStream&) = delete;
  PngStream& operator=(const PngStream&) = delete;
  ~PngStream() { png_destroy_write_struct(&png_, &info_); }

  bool Start(int width, int height) {
    png_ = png_create_write_struct(PNG_LIBPNG_VER_STRING, this, OnError, OnWarning);
    if (png_ == nullptr) return false;
    info_ = png_create_info_struct(png_);
    if (info_ == nullptr || setjmp(png_jmpbuf(png_))) return false;
    png_set_write_fn(png_, this, OnWrite, nullptr);
    png_set_IHDR(png_, info_, width, height, 8, PNG_COLOR_TYPE_RGB, PNG_INTERLACE_NONE,
                 PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
    // A third of the default level's time for a seventh more bytes.
    png_set_compression_level(png_, 3);
    png_write_info(png_, info_);
    return true;
  }

  bool WriteRow(const uint8_t* row) {
    if (setjmp(png_jmpbuf(png_))) return false;
    png_write_row(png_, row);
    return true;
  }

  bool End() {
    if (setjmp(png_jmpbuf(png_))) return false;
    png_write_end(png_, info_);
    return true;
  }

  absl::Status error() const {
    return absl::InternalError(absl::StrCat("the PNG encoder failed: ", error_));
  }
  std::string&& TakeBytes() { return std::move(bytes_); }

 private:
  static void OnError(png_structp png, png_const_charp message) {
    std::strncpy(static_cast<PngStream*>(png_get_error_ptr(png))->error_, message,
                 sizeof(error_) - 1);
    png_longjmp(png, 1);
  }
  static void OnWarning(png_structp, png_const_charp) {}
  static void OnWrite(png_structp png, png_bytep data, size_t size) {
    if (!static_cast<PngStream*>(png_get_io_ptr(png))->Append(data, size)) {
      png_error(png, "out of memory");
    }
  }

  bool Append(const uint8_t* data, size_t size) {
    try {
      bytes_.append(reinterpret_cast<const char*>(data), size);
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  char error_[128] = "out of memory";
  std::string bytes_;
};

// Collects one row of cells, then writes its pixel rows: compression keeps up with the frames, and
// only one row of the grid is held.
class PngSheetEncoder : public FrameEncoder {
 public:
  explicit PngSheetEncoder(const VideoWriterOptions& options)
      : sheet_(LayOutContactSheet(options.num_frames, options.width, options.height)),
        row_bytes_(size_t{3} * sheet_.width()),
        strip_(row_bytes_ * sheet_.frame_height, ContactSheetLayout::kGrey) {}

  FrameConversion conversion() const override { return FrameConversion::kRound; }

  bool Wants(int frame) const override {
    return std::binary_search(sheet_.frames.begin(), sheet_.frames.end(), frame);
  }

  absl::Status Add(absl::Span<const uint8_t> frame) override {
    if (cell_ == 0 && !png_.Start(sheet_.width(), sheet_.height())) return png_.error();
    const size_t frame_row_bytes = size_t{3} * sheet_.frame_width;
    for (int y = 0; y < sheet_.frame_height; ++y) {
      std::memcpy(&strip_[y * row_bytes_ + size_t{3} * sheet_.left(cell_)],
                  &frame[y * frame_row_bytes], frame_row_bytes);
    }
    ++cell_;
    return cell_ % sheet_.columns == 0 ? WriteStrip() : absl::OkStatus();
  }

  absl::StatusOr<std::string> Finish() override {
    if (cell_ % sheet_.columns != 0) RETURN_IF_ERROR(WriteStrip());
    if (!png_.End()) return png_.error();
    return png_.TakeBytes();
  }

 private:
  absl::Status WriteStrip() {
    if (!first_strip_) {
      const std::vector<uint8_t> gap(row_bytes_, ContactSheetLayout::kGrey);
      for (int y = 0; y < ContactSheetLayout::kGap; ++y) {
        if (!png_.WriteRow(gap.data())) return png_.error();
      }
    }
    first_strip_ = false;
    for (int y = 0; y < sheet_.frame_height; ++y) {
      if (!png_.WriteRow(&strip_[y * row_bytes_])) return png_.error();
    }
    std::fill(strip_.begin(), strip_.end(), ContactSheetLayout::kGrey);
    return absl::OkStatus();
  }

  const ContactSheetLayout sheet_;
  const size_t row_bytes_;
  std::vector<uint8_t> strip_;
  PngStream png_;
  int cell_ = 0;
  bool first_strip_ = true;
};

}  // namespace

std::unique_ptr<FrameEncoder> NewPngSheetEncoder(const VideoWriterOptions& options) {
  return std::make_unique<PngSheetEncoder>(options);
}

}  // namespace dlo
