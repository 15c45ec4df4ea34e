#include "models/wan/transformer_specs.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dlo {
namespace {

class SpecList {
 public:
  explicit SpecList(DType dtype) : dtype_(dtype) {}

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
  int block_ = -1;
  std::string prefix_;
  std::vector<TensorSpec> specs_;
};

}  // namespace

std::vector<TensorSpec> WanTransformerSpecs(const WanTransformerConfig& config, DType dtype) {
  const int64_t hidden = config.hidden_size();
  const auto [pt, ph, pw] = config.patch_size;
  SpecList list(dtype);

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
    for (const char* attention : {"attn1", "attn2"}) {
      for (const char* part : {"to_q", "to_k", "to_v", "to_out.0"}) {
        list.AddLinear(absl::StrCat(attention, ".", part), hidden, hidden);
      }
      list.Add(absl::StrCat(attention, ".norm_q.weight"), {hidden});
      list.Add(absl::StrCat(attention, ".norm_k.weight"), {hidden});
    }
    if (config.cross_attn_norm) {
      list.AddFloat32("norm2.weight", {hidden});
      list.AddFloat32("norm2.bias", {hidden});
    }
    list.AddLinear("ffn.net.0.proj", hidden, config.ffn_dim);
    list.AddLinear("ffn.net.2", config.ffn_dim, hidden);
  }
  return list.Take();
}

}  // namespace dlo
