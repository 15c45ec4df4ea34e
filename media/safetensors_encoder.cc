#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "media/frame_encoder.h"

namespace dlo {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors holds little-endian values");

// Written frame by frame behind a header whose size is known in advance. The format: 8 bytes
// little-endian length of the header, the header (JSON, padded with blanks to a multiple of 8), the
// values.
class SafetensorsEncoder : public FrameEncoder {
 public:
  explicit SafetensorsEncoder(const VideoWriterOptions& options) {
    const int64_t values_bytes =
        int64_t{options.num_frames} * options.height * options.width * 3 * int64_t{sizeof(float)};
    std::string header = absl::StrCat(R"({"__metadata__":{"fps":")", options.fps,
                                      R"("},"video":{"dtype":"F32","shape":[)", options.num_frames,
                                      ",", options.height, ",", options.width,
                                      R"(,3],"data_offsets":[0,)", values_bytes, "]}}");
    header.resize((header.size() + 7) / 8 * 8, ' ');
    const uint64_t header_bytes = header.size();
    bytes_.reserve(sizeof(header_bytes) + header.size() + values_bytes);
    bytes_.append(reinterpret_cast<const char*>(&header_bytes), sizeof(header_bytes));
    bytes_ += header;
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

std::unique_ptr<FrameEncoder> NewSafetensorsEncoder(const VideoWriterOptions& options) {
  return std::make_unique<SafetensorsEncoder>(options);
}

}  // namespace dlo
