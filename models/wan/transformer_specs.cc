#include "models/wan/transformer_specs.h"

#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace dlo {
namespace {

class SpecList {
 public:
  SpecList(DType dtype, OnlineQuantization quantization)
      : dtype_(dtype), fp8_(quantization == OnlineQuantization::kPerTensorFp8) {}

  void StartBlock(int block) {
    block_ = block;
    prefix_ = absl::StrCat("blocks.", block, ".");
  }
  void Add(absl::string_view name, std::vector<int64_t> shape) {
    Push(name, std::move(shape), dtype_);
  }
  void AddFloat32(absl::string_view name, std::vector<int64_t> shape) {
    Push(name, std::move(shape), DType::kF32);
  }
  void AddLinear(absl::string_view name, int64_t in, int64_t out) {
    Add(absl::StrCat(name, ".weight"), {out, in});
    Add(absl::StrCat(name, ".bias"), {out});
  }
  // A linear layer of a block, and its scale where it is quantised.
  void AddBlockLinear(absl::string_view name, int64_t in, int64_t out) {
    AddSharingScale(name, name, in, out);
    AddScale(name);
    Add(absl::StrCat(name, ".bias"), {out});
  }
  // Its weight, which has the scale that AddScale(scale) adds.
  void AddSharingScale(absl::string_view name, absl::string_view scale, int64_t in, int64_t out) {
    Push(absl::StrCat(name, ".weight"), {out, in}, fp8_ ? DType::kF8E4M3 : dtype_);
    if (fp8_) specs_.back().scale = absl::StrCat(prefix_, scale, ".weight_scale");
  }
  void AddScale(absl::string_view name) {
    if (fp8_) AddFloat32(absl::StrCat(name, ".weight_scale"), {1});
  }
  void AddFloat32Linear(absl::string_view name, int64_t in, int64_t out) {
    AddFloat32(absl::StrCat(name, ".weight"), {out, in});
    AddFloat32(absl::StrCat(name, ".bias"), {out});
  }

  std::vector<TensorSpec> Take() { return std::move(specs_); }

 private:
  void Push(absl::string_view name, std::vector<int64_t> shape, DType dtype) {
    specs_.push_back({.name = absl::StrCat(prefix_, name),
                      .shape = std::move(shape),
                      .dtype = dtype,
                      .block = block_});
  }

  const DType dtype_;
  const bool fp8_;
  int block_ = -1;
  std::string prefix_;
  std::vector<TensorSpec> specs_;
};

// Which dimension of a tensor is cut between tensor-parallel ranks; -1: none.
int CutDimension(absl::string_view name) {
  if (!absl::StartsWith(name, "blocks.")) return -1;
  for (const char* rows :
       {".to_q.weight", ".to_q.bias", ".to_k.weight", ".to_k.bias", ".to_v.weight", ".to_v.bias",
        ".norm_q.weight", ".norm_k.weight", ".ffn.net.0.proj.weight", ".ffn.net.0.proj.bias"}) {
    if (absl::EndsWith(name, rows)) return 0;
  }
  for (const char* columns : {".to_out.0.weight", ".ffn.net.2.weight"}) {
    if (absl::EndsWith(name, columns)) return 1;
  }
  return -1;
}

}  // namespace

std::vector<TensorSpec> WanTransformerSpecs(const WanTransformerConfig& config, DType dtype,
                                            OnlineQuantization quantization) {
  const int64_t hidden = config.hidden_size();
  const auto [pt, ph, pw] = config.patch_size;
  SpecList list(dtype, quantization);

  list.Add("patch_embedding.weight", {hidden, config.in_channels, pt, ph, pw});
  list.Add("patch_embedding.bias", {hidden});
  list.AddFloat32Linear("condition_embedder.time_embedder.linear_1", config.freq_dim, hidden);
  list.AddFloat32Linear("condition_embedder.time_embedder.linear_2", hidden, hidden);
  list.AddLinear("condition_embedder.time_proj", hidden, 6 * hidden);
  list.AddLinear("condition_embedder.text_embedder.linear_1", config.text_dim, hidden);
  list.AddLinear("condition_embedder.text_embedder.linear_2", hidden, hidden);
  list.AddLinear("proj_out", hidden, config.out_channels * pt * ph * pw);
  list.AddFloat32("scale_shift_table", {1, 2, hidden});

  for (int block = 0; block < config.num_layers; ++block) {
    list.StartBlock(block);
    list.AddFloat32("scale_shift_table", {1, 6, hidden});
    for (const char* part : {"to_q", "to_k", "to_v"}) {
      const std::string name = absl::StrCat("attn1.", part);
      list.AddSharingScale(name, "attn1.to_qkv", hidden, hidden);
      list.Add(absl::StrCat(name, ".bias"), {hidden});
    }
    list.AddScale("attn1.to_qkv");
    list.AddBlockLinear("attn1.to_out.0", hidden, hidden);
    list.Add("attn1.norm_q.weight", {hidden});
    list.Add("attn1.norm_k.weight", {hidden});
    for (const char* part : {"to_q", "to_k", "to_v", "to_out.0"}) {
      list.AddBlockLinear(absl::StrCat("attn2.", part), hidden, hidden);
    }
    list.Add("attn2.norm_q.weight", {hidden});
    list.Add("attn2.norm_k.weight", {hidden});
    if (config.cross_attn_norm) {
      list.AddFloat32("norm2.weight", {hidden});
      list.AddFloat32("norm2.bias", {hidden});
    }
    list.AddBlockLinear("ffn.net.0.proj", hidden, config.ffn_dim);
    list.AddBlockLinear("ffn.net.2", config.ffn_dim, hidden);
  }
  return list.Take();
}

absl::StatusOr<std::vector<TensorSpec>> WanTransformerTpSpecs(const WanTransformerConfig& config,
                                                              DType dtype, int rank, int tp,
                                                              OnlineQuantization quantization) {
  if (tp < 1 || rank < 0 || rank >= tp) {
    return absl::InvalidArgumentError(absl::StrCat("there is no rank ", rank, " of ", tp));
  }
  for (const auto& [what, count] : {std::pair("attention heads", config.num_attention_heads),
                                    std::pair("feed-forward channels", config.ffn_dim)}) {
    if (count % tp != 0) {
      return absl::InvalidArgumentError(absl::StrCat("the transformer's ", count, " ", what,
                                                     " cannot be shared by ", tp, " ranks"));
    }
  }
  std::vector<TensorSpec> specs = WanTransformerSpecs(config, dtype, quantization);
  for (TensorSpec& spec : specs) {
    const int dim = CutDimension(spec.name);
    if (dim < 0 || tp == 1) continue;
    const int64_t full = spec.shape[dim];
    spec.shape[dim] = full / tp;
    spec.slice = TensorSlice{.dim = dim, .begin = rank * (full / tp), .full = full};
  }
  return specs;
}

}  // namespace dlo
