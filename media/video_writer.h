// Encodes a video while its frames are still being decoded.
//
//   ASSIGN_OR_RETURN(auto writer,
//                    VideoWriter::Create({.format = VideoFormat::kMp4, .width = 832, .height = 480,
//                                         .num_frames = 81, .fps = 16}));
//   RETURN_IF_ERROR(writer->Append(frames.rgb));  // as often as frames arrive
//   ASSIGN_OR_RETURN(EncodedVideo video, writer->Finish());
//
// Append converts and copies into a bounded queue that one encoder thread serves, and blocks while
// the queue is full. Create finds and opens the encoder, so a machine without H.264 is told before
// any work is done. Append and Finish belong to one thread at a time. Destruction without Finish
// abandons the video: the thread is joined, nothing is left behind (everything is in memory).
//
// The bytes depend on the frames, the options and the encoder's version only, never on time or on
// the number of cores.
//
//   kMp4          H.264 in MP4, yuv420p, BT.709 limited range, index in front (faststart);
//                 uint8(value * 255) truncated, as export_to_video of diffusers 0.42 does. Width
//                 and height are even.
//   kPngSheet     Frames side by side, see media/contact_sheet.h; round(value * 255), as diffusers'
//                 PIL output.
//   kSafetensors  Tensor `video`, float32 [frames, height, width, 3]: the values appended, bit for
//                 bit.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace dlo {

enum class VideoFormat { kMp4, kPngSheet, kSafetensors };

// "video/mp4", "image/png", "application/vnd.safetensors".
absl::string_view VideoMediaType(VideoFormat format);

struct VideoWriterOptions {
  VideoFormat format = VideoFormat::kMp4;
  int width = 0;
  int height = 0;
  int num_frames = 0;    // of the whole video
  double fps = 16;       // MP4 only; 23.976, 29.97 and the like become n * 1000/1001
  int queue_frames = 8;  // frames that wait for the encoder before Append blocks
};

struct EncodedVideo {
  std::string bytes;
  std::string sha256;  // of bytes, lower-case hexadecimal
  std::string media_type;
};

class VideoWriter {
 public:
  // INVALID_ARGUMENT for a size, count or rate that cannot be; FAILED_PRECONDITION when no H.264
  // encoder works here, naming those that exist.
  static absl::StatusOr<std::unique_ptr<VideoWriter>> Create(const VideoWriterOptions& options);

  virtual ~VideoWriter() = default;

  // The next frames: float32 [n, height, width, 3] in 0..1, n >= 0. Values outside 0..1 are clamped
  // (kMp4, kPngSheet) or kept (kSafetensors). INVALID_ARGUMENT for a part of a frame, for more
  // frames than announced, and for a value that is NaN or infinite (the message names the frame);
  // an encoder's failure is INTERNAL. After an error every call returns that error.
  virtual absl::Status Append(absl::Span<const float> rgb) = 0;

  // Waits for the encoder and hands over the video. Once only. FAILED_PRECONDITION when frames are
  // missing.
  virtual absl::StatusOr<EncodedVideo> Finish() = 0;
};

}  // namespace dlo
