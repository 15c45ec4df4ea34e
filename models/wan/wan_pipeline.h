// The Wan text-to-video pipelines: Wan 2.1, Wan 2.2 A14B (two experts) and Wan 2.2 TI2V-5B.
//
// What diffusers' WanPipeline computes, with the same random numbers. Source: diffusers 0.42
// pipeline_wan.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "models/text/t5_tokenizer.h"
#include "models/umt5/umt5.h"
#include "models/video_pipeline.h"
#include "models/wan/transformer.h"
#include "models/wan/vae.h"
#include "models/wan/wan_config.h"
#include "offload/block_streamer.h"
#include "offload/visit_log.h"
#include "runtime/communicator.h"
#include "runtime/device.h"

namespace dlo {

namespace hwr {
class Lease;
}

struct WanComponents {
  WanConfig config;
  std::unique_ptr<Device> device;  // outlives every weight below
  // What weights are mapped by, which outlives them; null: none are, or by their checkpoint alone.
  std::shared_ptr<const hwr::Lease> lease;
  std::shared_ptr<Communicator> weight_group;  // null: none
  std::unique_ptr<BlockStreamer> streamer;     // null: all blocks are resident
  std::unique_ptr<T5Tokenizer> tokenizer;
  Umt5Encoder text_encoder;
  std::vector<WanTransformer> experts;          // high noise first
  std::optional<WanVae> vae;                    // resident; else it is built of vae_weights
  std::optional<ComponentWeights> vae_weights;  // staged
  int64_t resident_blocks = 0;                  // leading ones of each expert, not streamed
  int rank = 0;                                 // of this process
};

// Stages follow each other on the device. Where blocks are streamed, a stage's weights come when it
// begins and go when it ends: the text encoder's and the running expert's beside the streamer's
// slots, and the VAE's when the slots have been given back. So the peak of a request is the largest
// of its stages', not their sum.
class WanPipeline : public VideoPipeline {
 public:
  explicit WanPipeline(WanComponents components);
  ~WanPipeline() override;

  absl::StatusOr<GenerationStats> Generate(const VideoRequest& request,
                                           GenerationObserver& observer) override;
  absl::Status Walk(const VideoSettings& settings) override;
  absl::Status FinishWalk() override;
  absl::Status health() const override;
  int64_t visits() const override { return c_.streamer == nullptr ? 0 : c_.streamer->visit(); }

  PipelineMemory memory() const override;

  // The stages of Generate. They throw what libtorch throws.

  // The embedding of token ids, as one of `text_rows` rows of which the rest are padding.
  absl::StatusOr<TextEmbedding> EncodeText(const std::vector<int64_t>& ids, int64_t text_rows);

  // Gaussian noise as torch.randn draws it on the CPU, whatever the device: [1, C, frames, rows,
  // columns] float32.
  at::Tensor InitialLatents(const VideoSettings& settings) const;

  // All steps from InitialLatents; `texts` holds the prompt and, for guidance, the negative prompt.
  // Of the experts only the one that runs is on the device. CANCELLED between steps.
  absl::StatusOr<at::Tensor> Denoise(const VideoSettings& settings,
                                     const std::vector<TextEmbedding>& texts,
                                     GenerationObserver& observer);

  // Hands the frames of [1, C, frames, rows, columns] latents to the observer.
  absl::Status Decode(const at::Tensor& latents, GenerationObserver& observer);

 private:
  absl::StatusOr<GenerationStats> Run(const VideoRequest& request, GenerationObserver& observer);
  absl::StatusOr<std::vector<TextEmbedding>> EncodePrompts(const VideoRequest& request,
                                                           GenerationObserver& observer);
  // Ends the stage: its peak of device memory, from which the next one's is counted.
  int64_t TakeDevicePeak();
  // Fills in what the streamer measured.
  void TellStreaming(GenerationStats* stats);

  // With what libtorch holds, on the CPU too.
  DeviceMemory UsedMemory() const;

  WanComponents c_;
  // Of the latest request's stages that have ended.
  std::atomic<int64_t> stages_peak_ = 0;
  // What libtorch held when the request that runs began: weights. -1: none runs.
  std::atomic<int64_t> tensors_at_rest_ = -1;
  std::optional<VisitLog> visits_;  // of a request with trace, until the next one
};

// Loads the repository at options.root. Errors name the component's file; see ReadWanConfig,
// T5Tokenizer::Load and LoadTensors.
absl::StatusOr<std::unique_ptr<VideoPipeline>> LoadWanPipeline(const PipelineOptions& options);

}  // namespace dlo
