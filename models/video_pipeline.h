// A loaded text-to-video model: prompt in, frames out. The worker's view of models/; its header is
// torch-free.
//
//   ASSIGN_OR_RETURN(auto pipeline, LoadVideoPipeline({.root = root, .dtype = DType::kBF16}));
//   RETURN_IF_ERROR(pipeline->Generate(request, observer).status());
//
// One request at a time; Generate may be called from any one thread. After an error or a
// cancellation the pipeline serves the next request. libtorch's exceptions never leave it
// (RESOURCE_EXHAUSTED for out of memory, INTERNAL otherwise).
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/dtype.h"
#include "models/model_card.h"
#include "offload/streamer_stats.h"

namespace dlo {

enum class Stage { kEncodingText, kDenoising, kDecoding };

struct VideoRequest {
  std::string prompt;
  std::string negative_prompt;
  VideoSettings settings;
  bool trace = false;  // record a timeline
};

// A run of decoded frames: float32 [num_frames, height, width, 3] in 0..1, row-major.
struct FrameSpan {
  absl::Span<const float> rgb;
  int num_frames = 0;
  int height = 0;
  int width = 0;
};

// Told by Generate, on its thread, what happens. Calls come in the order of the stages.
class GenerationObserver {
 public:
  virtual ~GenerationObserver() = default;
  virtual void OnStage(Stage stage) = 0;
  // `step` denoising steps of `num_steps` are done.
  virtual void OnStep(int step, int num_steps) = 0;
  // The next frames, in order. They are valid during the call. An error ends the generation with
  // it.
  virtual absl::Status OnFrames(const FrameSpan& frames) = 0;
  // Asked before each step and each decoded chunk; true ends the generation with CANCELLED.
  virtual bool cancelled() const = 0;
};

// What a stage streamed.
struct StageStreaming {
  Stage stage = Stage::kEncodingText;
  StreamerStats streamed;
};

struct GenerationStats {
  absl::Duration text;
  absl::Duration denoise;
  absl::Duration decode;                  // including the time OnFrames took
  int64_t device_bytes_peak = 0;          // weights, slots and activations
  int64_t bus_bytes = 0;                  // streamed from host to device
  std::vector<StageStreaming> streaming;  // of the stages that streamed
  std::string timeline;                   // Chrome trace JSON if the request asked, at most 3 MiB
};

class VideoPipeline {
 public:
  virtual ~VideoPipeline() = default;
  virtual absl::StatusOr<GenerationStats> Generate(const VideoRequest& request,
                                                   GenerationObserver& observer) = 0;
};

struct PipelineOptions {
  std::filesystem::path root;  // a diffusers repository
  DType dtype =
      DType::kBF16;  // kF32 or kBF16: transformer and text encoder; the VAE runs in float32
  std::string device = "cpu";  // "cpu" or "cuda"
  int threads = 0;  // torch intra-op threads of this process; 0: as many as there are cores
  // 0: every transformer block stays on the device. Else blocks stay on the host and are streamed
  // whole through so many device slots, at least 2; the video is the same byte for byte.
  int stream_slots = 0;
};

absl::StatusOr<std::unique_ptr<VideoPipeline>> LoadVideoPipeline(const PipelineOptions& options);

}  // namespace dlo
