#include "models/umt5/umt5_specs.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace dlo {

TensorSpec Umt5TokenTable(const Umt5Config& config, DType dtype) {
  return {.name = "shared.weight",
          .shape = {config.vocab_size, config.d_model},
          .dtype = dtype,
          .aliases = {"encoder.embed_tokens.weight"}};
}

std::vector<TensorSpec> Umt5Specs(const Umt5Config& config, DType dtype) {
  const int64_t model = config.d_model, inner = config.num_heads * config.d_kv;
  std::vector<TensorSpec> specs = {
      Umt5TokenTable(config, dtype),
      {.name = "encoder.final_layer_norm.weight", .shape = {model}, .dtype = dtype},
  };
  for (int block = 0; block < config.num_layers; ++block) {
    const auto add = [&](absl::string_view name, std::vector<int64_t> shape) {
      specs.push_back({.name = absl::StrCat("encoder.block.", block, ".layer.", name),
                       .shape = std::move(shape),
                       .dtype = dtype,
                       .block = block});
    };
    add("0.layer_norm.weight", {model});
    add("0.SelfAttention.q.weight", {inner, model});
    add("0.SelfAttention.k.weight", {inner, model});
    add("0.SelfAttention.v.weight", {inner, model});
    add("0.SelfAttention.o.weight", {model, inner});
    add("0.SelfAttention.relative_attention_bias.weight",
        {config.relative_attention_num_buckets, config.num_heads});
    add("1.layer_norm.weight", {model});
    add("1.DenseReluDense.wi_0.weight", {config.d_ff, model});
    add("1.DenseReluDense.wi_1.weight", {config.d_ff, model});
    add("1.DenseReluDense.wo.weight", {model, config.d_ff});
  }
  return specs;
}

std::vector<TensorSpec> Umt5DeviceSpecs(const Umt5Config& config, DType dtype) {
  std::vector<TensorSpec> specs = Umt5Specs(config, dtype);
  specs.erase(specs.begin());
  return specs;
}

}  // namespace dlo
