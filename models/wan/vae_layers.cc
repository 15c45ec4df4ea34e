#include "models/wan/vae_layers.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "models/wan/vae_kernels.h"

namespace dlo {
namespace {

bool FusedOnCpu(const at::Tensor& x) {
  return x.device().is_cpu() && x.scalar_type() == at::kFloat;
}

// x / max(|x|, 1e-12) * gain [, SiLU] into `out`, which may be `x`.
void NormInto(const at::Tensor& x, const at::Tensor& gain, bool silu, const at::Tensor& out) {
  if (!FusedOnCpu(x)) {
    at::Tensor y = x / x.norm(2, {-1}, /*keepdim=*/true).clamp_min_(1e-12) * gain;
    out.copy_(silu ? at::silu_(y) : y);
    return;
  }
  const int64_t channels = x.size(-1);
  const float* from = x.const_data_ptr<float>();
  const float* by = gain.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(1, 16384 / channels);  // floats that are worth a thread
  at::parallel_for(0, x.numel() / channels, grain, [&](int64_t begin, int64_t end) {
    NormRows(from + begin * channels, by, end - begin, channels, silu, to + begin * channels);
  });
}

// Nearest neighbour, twice in both directions.
at::Tensor UpsampleTwice(const at::Tensor& frames) {
  return at::upsample_nearest2d(frames.permute({0, 3, 1, 2}),
                                {2 * frames.size(1), 2 * frames.size(2)})
      .permute({0, 2, 3, 1})
      .contiguous();
}

// Frame t becomes two: the first and the second half of its channels.
at::Tensor SplitChannelsIntoTime(const at::Tensor& frames) {
  const int64_t n = frames.size(0), rows = frames.size(1), columns = frames.size(2);
  const int64_t channels = frames.size(3) / 2;
  return frames.view({n, rows, columns, 2, channels})
      .permute({0, 3, 1, 2, 4})
      .reshape({2 * n, rows, columns, channels});
}

// Mean over groups of the (channel, time, row, column) values that fold into one position. Time is
// padded with zeros in front.
at::Tensor AverageDown(const at::Tensor& frames, int64_t out_channels, int64_t time,
                       int64_t space) {
  const int64_t pad = (time - frames.size(0) % time) % time;
  const at::Tensor x = at::constant_pad_nd(frames, {0, 0, 0, 0, 0, 0, pad, 0});
  const int64_t n = x.size(0) / time, rows = x.size(1) / space, columns = x.size(2) / space;
  return x.view({n, time, rows, space, columns, space, x.size(3)})
      .permute({0, 2, 4, 6, 1, 3, 5})
      .reshape({n, rows, columns, out_channels, -1})
      .mean(-1);
}

// The inverse shape: channels repeat and unfold into time, rows and columns. The first chunk keeps
// one frame.
at::Tensor DuplicateUp(const at::Tensor& frames, int64_t out_channels, int64_t time, int64_t space,
                       bool first_chunk) {
  const int64_t n = frames.size(0), rows = frames.size(1), columns = frames.size(2);
  const int64_t repeats = out_channels * time * space * space / frames.size(3);
  const at::Tensor up = frames.repeat_interleave(repeats, 3)
                            .view({n, rows, columns, out_channels, time, space, space})
                            .permute({0, 4, 1, 5, 2, 6, 3})
                            .reshape({n * time, rows * space, columns * space, out_channels});
  return first_chunk ? up.narrow(0, time - 1, up.size(0) - time + 1) : up;
}

}  // namespace

Conv::Conv(const VaeLayerLoader& loader, const std::string& prefix, int64_t stride_time,
           int64_t stride_space, bool pad_space)
    : bias_(loader.Weight(absl::StrCat(prefix, ".bias")).clone()) {
  const at::Tensor weight = loader.Weight(absl::StrCat(prefix, ".weight"));
  const bool time = weight.dim() == 5;
  weight_ = weight.clone(time ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast);
  if (time) {
    stride_.push_back(stride_time);
    padding_.push_back(0);
  }
  for (int64_t axis : {-2, -1}) {
    stride_.push_back(stride_space);
    padding_.push_back(pad_space ? weight.size(axis) / 2 : 0);
  }
}

at::Tensor Conv::Forward(const at::Tensor& frames) const {
  const bool time = weight_.dim() == 5;
  const std::vector<int64_t> dilation(stride_.size(), 1);
  const at::Tensor x =
      time ? frames.unsqueeze(0).permute({0, 4, 1, 2, 3}) : frames.permute({0, 3, 1, 2});
  // at::conv3d would choose a plain loop over unfolded frames for most of these shapes, ten times
  // as slow as oneDNN.
  const at::Tensor y =
      FusedOnCpu(x) && at::globalContext().hasMKLDNN()
          ? at::mkldnn_convolution(x, weight_, bias_, padding_, stride_, dilation, /*groups=*/1)
      : time ? at::conv3d(x, weight_, bias_, stride_, padding_, dilation)
             : at::conv2d(x, weight_, bias_, stride_, padding_, dilation);
  return (time ? y.permute({0, 2, 3, 4, 1}).squeeze(0) : y.permute({0, 2, 3, 1})).contiguous();
}

CausalConv::CausalConv(VaeLayerLoader& loader, const std::string& prefix, int64_t history,
                       int64_t stride_time)
    : conv_(loader, prefix, stride_time), num_history_(history), slot_(loader.NewSlot()) {}

at::Tensor CausalConv::Window(int64_t n, int64_t rows, int64_t columns, const at::Tensor& like,
                              VaeStream& stream) const {
  at::Tensor window =
      at::empty({num_history_ + n, rows, columns, conv_.in_channels()}, like.options());
  const at::Tensor& history = stream.history(slot_);
  at::Tensor past = window.narrow(0, 0, num_history_);
  if (history.defined()) {
    past.copy_(history);
  } else {
    past.zero_();
  }
  return window;
}

at::Tensor CausalConv::NewFrames(const at::Tensor& window) const {
  return window.narrow(0, num_history_, window.size(0) - num_history_);
}

at::Tensor CausalConv::ForwardWindow(const at::Tensor& window, VaeStream& stream) const {
  Skip(window, stream);
  return conv_.Forward(window);
}

at::Tensor CausalConv::Forward(const at::Tensor& frames, VaeStream& stream) const {
  const at::Tensor window = Window(frames.size(0), frames.size(1), frames.size(2), frames, stream);
  NewFrames(window).copy_(frames);
  return ForwardWindow(window, stream);
}

void CausalConv::Skip(const at::Tensor& frames, VaeStream& stream) const {
  const at::Tensor last = frames.narrow(0, frames.size(0) - num_history_, num_history_);
  at::Tensor& history = stream.history(slot_);
  if (history.defined()) {
    history.copy_(last);
  } else {
    history = last.clone();  // a view would keep the whole window alive
  }
}

RmsNorm::RmsNorm(const VaeLayerLoader& loader, const std::string& prefix) {
  const at::Tensor gamma = loader.Weight(absl::StrCat(prefix, ".gamma")).flatten();
  gain_ = gamma * std::sqrt(static_cast<double>(gamma.numel()));
}

at::Tensor RmsNorm::Forward(const at::Tensor& frames) const {
  at::Tensor out = at::empty_like(frames);
  NormInto(frames, gain_, /*silu=*/false, out);
  return out;
}

void RmsNorm::SiluInto(const at::Tensor& frames, const at::Tensor& out) const {
  NormInto(frames, gain_, /*silu=*/true, out);
}

at::Tensor NormSiluConv::Forward(at::Tensor frames, VaeStream& stream) const {
  const at::Tensor window =
      conv_.Window(frames.size(0), frames.size(1), frames.size(2), frames, stream);
  norm_.SiluInto(frames, conv_.NewFrames(window));
  frames.reset();  // frees what only this layer still needed
  return conv_.ForwardWindow(window, stream);
}

ResidualBlock::ResidualBlock(VaeLayerLoader& loader, const VaeResnet& resnet)
    : first_(loader, resnet.prefix + ".norm1", resnet.prefix + ".conv1"),
      second_(loader, resnet.prefix + ".norm2", resnet.prefix + ".conv2") {
  if (resnet.in_channels != resnet.out_channels) {
    shortcut_.emplace(loader, resnet.prefix + ".conv_shortcut");
  }
}

at::Tensor ResidualBlock::Forward(const at::Tensor& frames, VaeStream& stream) const {
  at::Tensor y = second_.Forward(first_.Forward(frames, stream), stream);
  return y.add_(shortcut_ ? shortcut_->Forward(frames) : frames);
}

AttentionBlock::AttentionBlock(const VaeLayerLoader& loader, const std::string& prefix)
    : norm_(loader, prefix + ".norm"),
      to_qkv_(loader, prefix + ".to_qkv"),
      proj_(loader, prefix + ".proj") {}

at::Tensor AttentionBlock::Forward(const at::Tensor& frames) const {
  const int64_t n = frames.size(0);
  // [n, one head, positions, channels of q, k and v]
  const at::Tensor qkv = to_qkv_.Forward(norm_.Forward(frames)).flatten(1, 2).unsqueeze(1);
  const std::vector<at::Tensor> parts = qkv.chunk(3, -1);
  const at::Tensor mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2]);
  return proj_.Forward(mixed.reshape({n, frames.size(1), frames.size(2), frames.size(3)}))
      .add_(frames);
}

MidBlock::MidBlock(VaeLayerLoader& loader, const std::string& prefix, int64_t channels)
    : before_(loader, {prefix + ".resnets.0", channels, channels}),
      attention_(loader, prefix + ".attentions.0"),
      after_(loader, {prefix + ".resnets.1", channels, channels}) {}

at::Tensor MidBlock::Forward(const at::Tensor& frames, VaeStream& stream) const {
  return after_.Forward(attention_.Forward(before_.Forward(frames, stream)), stream);
}

Resampler::Resampler(VaeLayerLoader& loader, const std::string& prefix, Resample mode)
    : mode_(mode),
      conv_(loader, prefix + ".resample.1", /*stride_time=*/1,
            /*stride_space=*/IsDownsample(mode) ? 2 : 1, /*pad_space=*/!IsDownsample(mode)) {
  if (mode == Resample::kUpsample3d) {
    time_conv_.emplace(loader, prefix + ".time_conv");
  } else if (mode == Resample::kDownsample3d) {
    time_conv_.emplace(loader, prefix + ".time_conv", /*history=*/1, /*stride_time=*/2);
  }
}

at::Tensor Resampler::Forward(at::Tensor frames, VaeStream& stream) const {
  if (!IsDownsample(mode_)) {
    // The first frame passes by the time convolution, whose past then starts with zeros.
    if (time_conv_ && !stream.first_chunk()) {
      frames = SplitChannelsIntoTime(time_conv_->Forward(frames, stream));
    }
    return conv_.Forward(UpsampleTwice(frames));
  }
  // Zeros on the right and at the bottom only.
  frames = conv_.Forward(at::constant_pad_nd(frames, {0, 0, 0, 1, 0, 1}));
  if (!time_conv_) return frames;
  if (!stream.first_chunk()) return time_conv_->Forward(frames, stream);
  time_conv_->Skip(frames, stream);
  return frames;
}

StageLayers::StageLayers(VaeLayerLoader& loader, const VaeStage& stage) : shape_(stage) {
  for (const VaeResnet& resnet : stage.resnets) resnets_.emplace_back(loader, resnet);
  if (stage.resample != Resample::kNone) {
    resampler_.emplace(loader, stage.resample_prefix, stage.resample);
  }
}

at::Tensor StageLayers::Forward(const at::Tensor& frames, VaeStream& stream) const {
  at::Tensor x = frames;
  for (const ResidualBlock& resnet : resnets_) x = resnet.Forward(x, stream);
  if (resampler_) x = resampler_->Forward(x, stream);
  return shape_.shortcut ? x + Shortcut(frames, stream.first_chunk()) : x;
}

at::Tensor StageLayers::Shortcut(const at::Tensor& frames, bool first_chunk) const {
  const int64_t out = shape_.resample_channels;
  switch (shape_.resample) {
    case Resample::kNone:
      return AverageDown(frames, out, 1, 1);
    case Resample::kDownsample2d:
      return AverageDown(frames, out, 1, 2);
    case Resample::kDownsample3d:
      return AverageDown(frames, out, 2, 2);
    case Resample::kUpsample2d:
      return DuplicateUp(frames, out, 1, 2, first_chunk);
    case Resample::kUpsample3d:
      return DuplicateUp(frames, out, 2, 2, first_chunk);
  }
  return frames;
}

at::Tensor Patchify(const at::Tensor& frames, int64_t patch) {
  const int64_t n = frames.size(0), rows = frames.size(1) / patch, columns = frames.size(2) / patch;
  const int64_t channels = frames.size(3);
  return frames.view({n, rows, patch, columns, patch, channels})
      .permute({0, 1, 3, 5, 4, 2})
      .reshape({n, rows, columns, channels * patch * patch});
}

at::Tensor Unpatchify(const at::Tensor& frames, int64_t patch) {
  const int64_t n = frames.size(0), rows = frames.size(1), columns = frames.size(2);
  const int64_t channels = frames.size(3) / (patch * patch);
  return frames.view({n, rows, columns, channels, patch, patch})
      .permute({0, 1, 5, 2, 4, 3})
      .reshape({n, rows * patch, columns * patch, channels});
}

}  // namespace dlo
