#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "loader/safetensors.h"
#include "media/frame_encoder.h"

namespace dlo {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors holds little-endian values");

// Appends frame by frame behind a preamble that is known in advance.
class SafetensorsEncoder : public FrameEncoder {
 public:
  SafetensorsEncoder(std::string preamble, size_t values_bytes) : bytes_(std::move(preamble)) {
    bytes_.reserve(bytes_.size() + values_bytes);
  }

  FrameConversion conversion() const override { return FrameConversion::kNone; }

  absl::Status Add(absl::Span<const uint8_t> frame) override {
    bytes_.append(reinterpret_cast<const char*>(frame.data()), frame.size());
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Finish() override { return std::move(bytes_); }

 private:
  std::string bytes_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<FrameEncoder>> NewSafetensorsEncoder(
    const VideoWriterOptions& options) {
  const SafetensorsTensor video{
      .name = "video",
      .dtype = DType::kF32,
      .shape = {options.num_frames, options.height, options.width, 3},
  };
  ASSIGN_OR_RETURN(std::string preamble,
                   SafetensorsPreamble({video}, {{"fps", absl::StrCat(options.fps)}}));
  const size_t values_bytes =
      size_t{3} * sizeof(float) * options.num_frames * options.height * options.width;
  return std::make_unique<SafetensorsEncoder>(std::move(preamble), values_bytes);
}

}  // namespace dlo
