// A loaded text-to-video model: prompt in, frames out. The worker's view of models/; its header is
// torch-free.
//
//   ASSIGN_OR_RETURN(auto pipeline, LoadVideoPipeline({.root = root, .dtype = DType::kBF16}));
//   RETURN_IF_ERROR(pipeline->Generate(request, observer).status());
//
// One request at a time; Generate and the walks may be called from any one thread. After an error
// or a cancellation the pipeline serves the next request. libtorch's exceptions never leave it
// (RESOURCE_EXHAUSTED for out of memory, INTERNAL otherwise).
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/dtype.h"
#include "base/quantization.h"
#include "base/topology.h"
#include "loader/host_weight_plan.h"
#include "models/model_card.h"
#include "models/model_startup.h"
#include "offload/startup_agreement.h"
#include "offload/streamer_stats.h"
#include "runtime/communicator.h"

namespace dlo {

class FlightRecorder;

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
  absl::Duration decode;  // including the time OnFrames took
  // Weights, slots and activations on the device at the peak of each stage.
  int64_t device_bytes_peak_text = 0;
  int64_t device_bytes_peak_denoise = 0;
  int64_t device_bytes_peak_decode = 0;
  int64_t device_bytes_peak() const {
    return std::max({device_bytes_peak_text, device_bytes_peak_denoise, device_bytes_peak_decode});
  }
  int64_t bus_bytes = 0;                  // streamed from host to device
  std::vector<StageStreaming> streaming;  // of the stages that streamed
  std::string timeline;                   // Chrome trace JSON if the request asked, at most 3 MiB
};

// Of this process, now.
struct PipelineMemory {
  int64_t used_bytes = 0;     // on the device
  int64_t peak_bytes = 0;     // the largest used_bytes since the last request began
  int64_t weights_bytes = 0;  // of used_bytes: weights, slots, and whatever stays between requests
  int64_t pinned_bytes = 0;   // of the host, in buffers that the device copies from
};

class VideoPipeline {
 public:
  virtual ~VideoPipeline() = default;
  virtual absl::StatusOr<GenerationStats> Generate(const VideoRequest& request,
                                                   GenerationObserver& observer) = 0;

  // For the other ranks of a weight group, which fetch their weights from this one too. Without a
  // group both return at once.
  //
  // Asks the weights for all that a request of these settings would, without computing.
  virtual absl::Status Walk(const VideoSettings& settings) { return absl::OkStatus(); }
  // The same for what a Generate that failed has left of its request.
  virtual absl::Status FinishWalk() { return absl::OkStatus(); }

  // OK, or why this process can serve no more: its group is broken. PeersOfError gives the ranks of
  // the group that are the cause, where they are known.
  virtual absl::Status health() const { return absl::OkStatus(); }

  // Blocks that the current or latest request has asked the weights for. Any thread.
  virtual int64_t visits() const { return 0; }
  // Any thread.
  virtual PipelineMemory memory() const { return {}; }
};

struct PipelineOptions {
  std::filesystem::path root;  // a diffusers repository
  DType dtype =
      DType::kBF16;  // kF32 or kBF16: transformer and text encoder; the VAE runs in float32
  // Of the linear layers in the transformers' blocks, while they are loaded.
  OnlineQuantization quantization = OnlineQuantization::kNone;
  std::string device = "cpu";  // "cpu" or "cuda"
  int threads = 0;  // torch intra-op threads of this process; 0: as many as there are cores
  // 0: every transformer block stays on the device. Else blocks stay on the host and are streamed
  // through so many device slots, at least 2; the video is the same byte for byte.
  int stream_slots = 0;
  // With it each rank of the group holds one shard of every streamed block and blocks are gathered;
  // all ranks load the same model with the same options. Null: blocks are streamed whole.
  std::shared_ptr<Communicator> weight_group;
  // Whether blocks that are streamed whole may stay in the checkpoint's pages, which processes on a
  // host share.
  CheckpointMmap checkpoint_mmap = CheckpointMmap::kAuto;
  // What else the group's ranks must have in common, e.g. the build.
  std::vector<Setting> agreement;
  // Leading blocks of each transformer that stay on the device while it is in use, streamed whole
  // otherwise; kResidentLayersAuto: as many as fit under device_memory_limit_bytes beside slots,
  // other weights and what the model's default request needs for activations. Not with a group.
  int resident_layers = 0;
  int64_t device_memory_limit_bytes = 0;  // 0: none
  // Host memory that the streamed blocks of all processes on this host may take; 0: no limit.
  int64_t host_memory_limit_bytes = 0;
  int processes_on_host = 1;
  // Used where blocks are streamed whole, and only there; an artifact that is not there is written
  // after the model has been loaded otherwise.
  HostWeightStoreOptions host_weights;
  // Filled in by the load, whether it succeeds or not. Null: nobody asks.
  StartupReport* report = nullptr;
  std::function<void(absl::string_view state)> on_startup_state;  // see ModelStartupOptions
  int rank = 0;  // of this process, as timelines name it
  // Notes the visits of streamed blocks; outlives the pipeline. Null: none.
  FlightRecorder* recorder = nullptr;
};

absl::StatusOr<std::unique_ptr<VideoPipeline>> LoadVideoPipeline(const PipelineOptions& options);

}  // namespace dlo
