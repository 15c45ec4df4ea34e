#include "media/video_writer.h"

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <limits>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "media/frame_encoder.h"

namespace dlo {
namespace {

class QueuedVideoWriter : public VideoWriter {
 public:
  QueuedVideoWriter(const VideoWriterOptions& options, std::unique_ptr<FrameEncoder> encoder)
      : options_(options), encoder_(std::move(encoder)), thread_([this] { Encode(); }) {}

  ~QueuedVideoWriter() override {
    (void)Fail(absl::CancelledError("the video was abandoned"));
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Append(absl::Span<const float> rgb) override {
    const size_t frame_values = size_t{3} * options_.width * options_.height;
    if (rgb.size() % frame_values != 0) {
      return Fail(absl::InvalidArgumentError(
          absl::StrCat("rgb: ", rgb.size(), " values are no whole number of frames of ",
                       options_.width, " x ", options_.height, " x 3")));
    }
    for (; !rgb.empty(); rgb.remove_prefix(frame_values)) {
      RETURN_IF_ERROR(AppendFrame(rgb.first(frame_values)));
    }
    std::lock_guard lock(mu_);
    return status_;
  }

  absl::StatusOr<EncodedVideo> Finish() override {
    if (num_appended_ != options_.num_frames) {
      RETURN_IF_ERROR(status());
      return Fail(absl::FailedPreconditionError(absl::StrCat(
          "the video has ", num_appended_, " of its ", options_.num_frames, " frames")));
    }
    {
      std::lock_guard lock(mu_);
      if (closed_) return absl::FailedPreconditionError("the video was handed over already");
      closed_ = true;
    }
    changed_.notify_all();
    thread_.join();
    RETURN_IF_ERROR(status());
    return std::move(video_);
  }

 private:
  using Frame = std::vector<uint8_t>;

  absl::Status status() const {
    std::lock_guard lock(mu_);
    return status_;
  }

  // Keeps the first error; returns it.
  absl::Status Fail(absl::Status error) {
    std::lock_guard lock(mu_);
    if (status_.ok()) status_ = std::move(error);
    changed_.notify_all();
    return status_;
  }

  absl::Status AppendFrame(absl::Span<const float> rgb) {
    if (num_appended_ == options_.num_frames) {
      return Fail(absl::InvalidArgumentError(
          absl::StrCat("rgb: more than the ", options_.num_frames, " frames of the video")));
    }
    Frame frame;
    {
      std::lock_guard lock(mu_);
      if (!free_.empty()) {
        frame = std::move(free_.back());
        free_.pop_back();
      }
    }
    const FrameConversion conversion = encoder_->conversion();
    frame.resize(rgb.size() * (conversion == FrameConversion::kNone ? sizeof(float) : 1));
    if (!ConvertFrame(conversion, rgb, frame.data())) {
      return Fail(absl::InvalidArgumentError(
          absl::StrCat("rgb: frame ", num_appended_, " holds a value that is NaN or infinite")));
    }
    const bool wanted = encoder_->Wants(num_appended_++);

    std::unique_lock lock(mu_);
    if (!wanted) {
      free_.push_back(std::move(frame));
      return status_;
    }
    changed_.wait(lock, [this] {
      return queue_.size() < static_cast<size_t>(options_.queue_frames) || !status_.ok();
    });
    if (status_.ok()) queue_.push_back(std::move(frame));
    changed_.notify_all();
    return status_;
  }

  // The encoder thread.
  void Encode() {
    absl::Status done;
    try {
      done = EncodeAll();
    } catch (const std::bad_alloc&) {
      done = absl::ResourceExhaustedError("out of memory while encoding the video");
    }
    if (!done.ok()) (void)Fail(std::move(done));
  }

  absl::Status EncodeAll() {
    Frame frame;
    for (;;) {
      {
        std::unique_lock lock(mu_);
        if (!frame.empty()) free_.push_back(std::move(frame));
        changed_.wait(lock, [this] { return !queue_.empty() || closed_ || !status_.ok(); });
        if (!status_.ok()) return status_;
        if (queue_.empty()) break;
        frame = std::move(queue_.front());
        queue_.pop_front();
      }
      changed_.notify_all();
      RETURN_IF_ERROR(encoder_->Add(frame));
    }
    ASSIGN_OR_RETURN(video_.bytes, encoder_->Finish());
    Sha256 hash;
    hash.Update(video_.bytes);
    video_.sha256 = hash.Finish();
    video_.media_type = std::string(VideoMediaType(options_.format));
    return absl::OkStatus();
  }

  const VideoWriterOptions options_;
  const std::unique_ptr<FrameEncoder> encoder_;  // Add and Finish: the encoder thread's
  int num_appended_ = 0;
  EncodedVideo video_;  // the encoder thread's until it is joined

  // Of std, not of Abseil: ThreadSanitizer does not see into Debian's Abseil. Guards what follows.
  mutable std::mutex mu_;
  std::condition_variable changed_;  // the queue, closed_ or status_
  std::deque<Frame> queue_;
  std::vector<Frame> free_;  // buffers to use again
  bool closed_ = false;      // no frame follows
  absl::Status status_;

  std::thread thread_;
};

absl::Status CheckOptions(const VideoWriterOptions& options) {
  // Bounds far above what any model makes, so that no product below overflows.
  constexpr int kSideMax = 16384;
  constexpr int kFramesMax = 1 << 20;
  constexpr double kFpsMax = 1000;
  auto check = [](absl::string_view name, int value, int max) {
    if (value >= 1 && value <= max) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": must be from 1 to ", max, ", got ", value));
  };
  RETURN_IF_ERROR(check("width", options.width, kSideMax));
  RETURN_IF_ERROR(check("height", options.height, kSideMax));
  RETURN_IF_ERROR(check("num_frames", options.num_frames, kFramesMax));
  RETURN_IF_ERROR(check("queue_frames", options.queue_frames, kFramesMax));
  if (options.format != VideoFormat::kMp4) return absl::OkStatus();
  if (!(options.fps > 0 && options.fps <= kFpsMax)) {
    return absl::InvalidArgumentError(
        absl::StrCat("fps: must be above 0 and at most ", kFpsMax, ", got ", options.fps));
  }
  if (options.width % 2 != 0 || options.height % 2 != 0) {
    return absl::InvalidArgumentError(absl::StrCat("width, height: must be even for yuv420p, got ",
                                                   options.width, " x ", options.height));
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view VideoMediaType(VideoFormat format) {
  switch (format) {
    case VideoFormat::kMp4:
      return "video/mp4";
    case VideoFormat::kPngSheet:
      return "image/png";
    case VideoFormat::kSafetensors:
      return "application/vnd.safetensors";
  }
  return "application/octet-stream";
}

bool ConvertFrame(FrameConversion conversion, absl::Span<const float> rgb, uint8_t* out) {
  bool finite = true;
  const float* values = rgb.data();
  const size_t size = rgb.size();
  for (size_t i = 0; i < size; ++i) {
    finite &= std::fabs(values[i]) <= std::numeric_limits<float>::max();
  }
  if (!finite) return false;
  switch (conversion) {
    case FrameConversion::kTruncate:
      for (size_t i = 0; i < size; ++i) {
        out[i] = static_cast<uint8_t>(
            static_cast<int>(std::min(std::max(values[i], 0.0f), 1.0f) * 255.0f));
      }
      break;
    case FrameConversion::kRound:
      for (size_t i = 0; i < size; ++i) {
        out[i] =
            static_cast<uint8_t>(std::lrint(std::min(std::max(values[i], 0.0f), 1.0f) * 255.0f));
      }
      break;
    case FrameConversion::kNone:
      std::memcpy(out, values, size * sizeof(float));
      break;
  }
  return true;
}

std::unique_ptr<VideoWriter> NewVideoWriter(const VideoWriterOptions& options,
                                            std::unique_ptr<FrameEncoder> encoder) {
  return std::make_unique<QueuedVideoWriter>(options, std::move(encoder));
}

absl::StatusOr<std::unique_ptr<VideoWriter>> VideoWriter::Create(
    const VideoWriterOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  std::unique_ptr<FrameEncoder> encoder;
  try {
    switch (options.format) {
      case VideoFormat::kMp4: {
        ASSIGN_OR_RETURN(encoder, NewMp4Encoder(options));
        break;
      }
      case VideoFormat::kPngSheet:
        encoder = NewPngSheetEncoder(options);
        break;
      case VideoFormat::kSafetensors: {
        ASSIGN_OR_RETURN(encoder, NewSafetensorsEncoder(options));
        break;
      }
    }
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("not enough memory to hold the video");
  }
  return NewVideoWriter(options, std::move(encoder));
}

}  // namespace dlo
