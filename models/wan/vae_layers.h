// The layers of AutoencoderKLWan, for one video that comes in chunks of frames. Internal to
// models/wan.
//
//   VaeLayerLoader loader(weights);
//   ResidualBlock block(loader, "decoder.mid_block.resnets.0");
//   VaeStream stream(loader.num_slots());
//   at::Tensor y = block.Forward(x, stream);
//
// "frames" are tensors [n, rows, columns, channels], contiguous: channels last, so convolutions run
// without reordering and a run of frames is a run of memory. Everything is float32 (other floating
// dtypes work through ATen). Any device; on the CPU convolutions go to oneDNN and norms to one
// fused kernel.
//
// Layers hold weights only and are safe to use from several threads; what a layer remembers of
// earlier chunks lies in the VaeStream. Source: diffusers 0.42 autoencoder_kl_wan.py. Wrong shapes
// throw c10::Error.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "models/wan/vae_specs.h"

namespace dlo {

// A tensor of the checkpoint by its name.
using VaeWeightSource = std::function<at::Tensor(const std::string& name)>;

// Hands out weights and places in the stream while layers are built.
class VaeLayerLoader {
 public:
  explicit VaeLayerLoader(const VaeWeightSource& weights) : weights_(weights) {}

  at::Tensor Weight(const std::string& name) const { return weights_(name); }
  int NewSlot() { return num_slots_++; }
  int num_slots() const { return num_slots_; }

 private:
  const VaeWeightSource& weights_;
  int num_slots_ = 0;
};

// What causal layers remember of one video between its chunks.
class VaeStream {
 public:
  explicit VaeStream(int num_slots) : history_(num_slots) {}

  at::Tensor& history(int slot) {
    return history_[slot];
  }  // undefined before a layer's first chunk
  bool first_chunk() const { return first_chunk_; }
  void EndChunk() { first_chunk_ = false; }

 private:
  std::vector<at::Tensor> history_;
  bool first_chunk_ = true;
};

// A convolution of frames: over each frame if its kernel has two axes, over time as well if it has
// three. Zeros around a frame, none before the first.
class Conv {
 public:
  Conv(const VaeLayerLoader& loader, const std::string& prefix, int64_t stride_time = 1,
       int64_t stride_space = 1, bool pad_space = true);

  at::Tensor Forward(const at::Tensor& frames) const;
  int64_t in_channels() const { return weight_.size(1); }

 private:
  at::Tensor weight_;  // channels last
  at::Tensor bias_;
  std::vector<int64_t> stride_;
  std::vector<int64_t> padding_;
};

// A convolution over time whose missing past is the video's earlier frames, and zeros before its
// start.
class CausalConv {
 public:
  // `history`: how many earlier frames it sees.
  CausalConv(VaeLayerLoader& loader, const std::string& prefix, int64_t history = 2,
             int64_t stride_time = 1);

  // The input for `n` new frames: the history and, behind it, room that the caller fills by way of
  // NewFrames(window).
  at::Tensor Window(int64_t n, int64_t rows, int64_t columns, const at::Tensor& like,
                    VaeStream& stream) const;
  at::Tensor NewFrames(const at::Tensor& window) const;
  // Convolves a filled window and remembers its last frames.
  at::Tensor ForwardWindow(const at::Tensor& window, VaeStream& stream) const;

  at::Tensor Forward(const at::Tensor& frames, VaeStream& stream) const;
  // Remembers frames that it does not convolve.
  void Skip(const at::Tensor& frames, VaeStream& stream) const;

 private:
  Conv conv_;
  int64_t num_history_;
  int slot_;
};

// x / max(|x|, 1e-12) * sqrt(C) * gamma over channels, then SiLU if asked for.
class RmsNorm {
 public:
  RmsNorm(const VaeLayerLoader& loader, const std::string& prefix);

  at::Tensor Forward(const at::Tensor& frames) const;
  void SiluInto(const at::Tensor& frames, const at::Tensor& out) const;

 private:
  at::Tensor gain_;  // [C]: sqrt(C) * gamma
};

// conv(SiLU(norm(x))), the norm written straight into the convolution's window.
class NormSiluConv {
 public:
  NormSiluConv(VaeLayerLoader& loader, const std::string& norm, const std::string& conv)
      : norm_(loader, norm), conv_(loader, conv) {}

  at::Tensor Forward(at::Tensor frames, VaeStream& stream) const;

 private:
  RmsNorm norm_;
  CausalConv conv_;
};

class ResidualBlock {
 public:
  ResidualBlock(VaeLayerLoader& loader, const VaeResnet& resnet);

  at::Tensor Forward(const at::Tensor& frames, VaeStream& stream) const;

 private:
  NormSiluConv first_;
  NormSiluConv second_;
  std::optional<Conv> shortcut_;
};

// One head of attention as wide as the channels, over the positions of each frame on its own.
class AttentionBlock {
 public:
  AttentionBlock(const VaeLayerLoader& loader, const std::string& prefix);

  at::Tensor Forward(const at::Tensor& frames) const;

 private:
  RmsNorm norm_;
  Conv to_qkv_;
  Conv proj_;
};

// Residual, attention, residual.
class MidBlock {
 public:
  MidBlock(VaeLayerLoader& loader, const std::string& prefix, int64_t channels);

  at::Tensor Forward(const at::Tensor& frames, VaeStream& stream) const;

 private:
  ResidualBlock before_;
  AttentionBlock attention_;
  ResidualBlock after_;
};

// A change of resolution. In time, the video's first frame stays one frame.
class Resampler {
 public:
  Resampler(VaeLayerLoader& loader, const std::string& prefix, Resample mode);

  at::Tensor Forward(at::Tensor frames, VaeStream& stream) const;

 private:
  Resample mode_;
  Conv conv_;
  std::optional<CausalConv> time_conv_;
};

// A stage: residual blocks, resampler, and for Wan 2.2 the shortcut around them.
class StageLayers {
 public:
  StageLayers(VaeLayerLoader& loader, const VaeStage& stage);

  at::Tensor Forward(const at::Tensor& frames, VaeStream& stream) const;

 private:
  at::Tensor Shortcut(const at::Tensor& frames, bool first_chunk) const;

  VaeStage shape_;
  std::vector<ResidualBlock> resnets_;
  std::optional<Resampler> resampler_;
};

// Wan 2.2's patches: frames [n, H, W, c] <-> [n, H / p, W / p, c * p * p], channel (c * p + column)
// * p + row.
at::Tensor Patchify(const at::Tensor& frames, int64_t patch);
at::Tensor Unpatchify(const at::Tensor& frames, int64_t patch);

}  // namespace dlo
