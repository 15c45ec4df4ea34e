// What turns prepared frames into the bytes of one format, behind VideoWriter's queue. Internal to
// media/ and its tests.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "media/video_writer.h"

namespace dlo {

// How a frame's float32 values become the bytes an encoder gets.
enum class FrameConversion {
  kTruncate,  // uint8(clamp(value, 0, 1) * 255), float32 product
  kRound,     // the same, rounded to the nearest integer, halves to even
  kNone,      // the four bytes of each value
};

// Writes `rgb` as `conversion` says to `out`, which holds 1 (4 for kNone) bytes a value. False if a
// value is not finite.
bool ConvertFrame(FrameConversion conversion, absl::Span<const float> rgb, uint8_t* out);

// One thread at a time. Frames come in order; those for which Wants is false are left out.
class FrameEncoder {
 public:
  virtual ~FrameEncoder() = default;
  virtual FrameConversion conversion() const = 0;
  virtual bool Wants(int frame) const { return true; }
  virtual absl::Status Add(absl::Span<const uint8_t> frame) = 0;
  virtual absl::StatusOr<std::string> Finish() = 0;
};

absl::StatusOr<std::unique_ptr<FrameEncoder>> NewMp4Encoder(const VideoWriterOptions& options);
// Tries only the named encoders, in this order.
absl::StatusOr<std::unique_ptr<FrameEncoder>> NewMp4Encoder(
    const VideoWriterOptions& options, const std::vector<std::string>& encoders);
std::unique_ptr<FrameEncoder> NewPngSheetEncoder(const VideoWriterOptions& options);
absl::StatusOr<std::unique_ptr<FrameEncoder>> NewSafetensorsEncoder(
    const VideoWriterOptions& options);

// The queue and thread in front of an encoder. `options` are valid.
std::unique_ptr<VideoWriter> NewVideoWriter(const VideoWriterOptions& options,
                                            std::unique_ptr<FrameEncoder> encoder);

}  // namespace dlo
