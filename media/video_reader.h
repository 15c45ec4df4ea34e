// Decodes a video file, for tests and for contact sheets of a finished MP4.
//
//   ASSIGN_OR_RETURN(auto reader, VideoReader::Open(bytes));
//   std::vector<float> frame(reader->info().frame_values());
//   for (;;) {
//     ASSIGN_OR_RETURN(bool more, reader->Next(absl::MakeSpan(frame)));
//     if (!more) break;
//   }
//
// One thread at a time. The input need not be trusted: what cannot be decoded is INVALID_ARGUMENT
// with FFmpeg's reason.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace dlo {

struct VideoInfo {
  std::string codec;        // "h264"
  std::string pix_fmt;      // "yuv420p"
  std::string color_space;  // "bt709", "unknown", ...: the matrix
  std::string color_range;  // "tv" (limited), "pc" (full), "unknown"
  int width = 0;
  int height = 0;
  int fps_num = 0;  // frames per second as a fraction
  int fps_den = 1;
  int num_frames = 0;      // as the container says; 0 if it does not
  bool faststart = false;  // the index (moov) stands before the data (mdat)

  double fps() const { return static_cast<double>(fps_num) / fps_den; }
  size_t frame_values() const { return size_t{3} * width * height; }
};

class VideoReader {
 public:
  // `bytes` are the file and must outlive the reader.
  static absl::StatusOr<std::unique_ptr<VideoReader>> Open(absl::string_view bytes);

  virtual ~VideoReader() = default;
  virtual const VideoInfo& info() const = 0;

  // Writes the next frame to `rgb`, float32 [height, width, 3], n/255 each. False after the last.
  virtual absl::StatusOr<bool> Next(absl::Span<float> rgb) = 0;
};

struct DecodedVideo {
  VideoInfo info;          // num_frames: those decoded
  std::vector<float> rgb;  // [num_frames, height, width, 3]
};

// All frames of a file, in memory. NOT_FOUND when there is no such file.
absl::StatusOr<DecodedVideo> DecodeVideo(absl::string_view bytes);
absl::StatusOr<DecodedVideo> ReadVideo(const std::filesystem::path& path);

}  // namespace dlo
