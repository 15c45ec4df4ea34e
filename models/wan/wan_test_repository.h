// A diffusers repository of a tiny Wan model in a temporary folder: its JSON files only, for tests
// of configuration and card.
//
//   WanTestRepository repository;
//   repository.Patch("scheduler/scheduler_config.json", {{"flow_shift", 5.0}});
//   ReadWanConfig(repository.root());
//
// The folder goes when the object does.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

#include "nlohmann/json.hpp"

namespace dlo {

class WanTestRepository {
 public:
  using json = nlohmann::json;

  WanTestRepository() {
    std::string folder = (std::filesystem::temp_directory_path() / "wan-XXXXXX").string();
    root_ = mkdtemp(folder.data());
    Write("model_index.json", {{"_class_name", "WanPipeline"},
                               {"scheduler", {"diffusers", "UniPCMultistepScheduler"}},
                               {"text_encoder", {"transformers", "UMT5EncoderModel"}},
                               {"tokenizer", {"transformers", "T5TokenizerFast"}},
                               {"transformer", {"diffusers", "WanTransformer3DModel"}},
                               {"transformer_2", {nullptr, nullptr}},
                               {"vae", {"diffusers", "AutoencoderKLWan"}}});
    Write("transformer/config.json", Transformer(16));
    Write("vae/config.json", {{"base_dim", 3}, {"num_res_blocks", 1}, {"dim_mult", {1, 1, 1, 1}}});
    Write("text_encoder/config.json", {{"model_type", "umt5"},
                                       {"architectures", {"UMT5EncoderModel"}},
                                       {"vocab_size", 256},
                                       {"d_model", 32},
                                       {"d_kv", 8},
                                       {"d_ff", 37},
                                       {"num_layers", 2},
                                       {"num_heads", 4}});
    Write("scheduler/scheduler_config.json",
          {{"prediction_type", "flow_prediction"}, {"use_flow_sigmas", true}, {"flow_shift", 3.0}});
  }
  ~WanTestRepository() {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  WanTestRepository(const WanTestRepository&) = delete;
  WanTestRepository& operator=(const WanTestRepository&) = delete;

  const std::filesystem::path& root() const { return root_; }

  void WriteText(const std::string& file, const std::string& text) {
    std::filesystem::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file, std::ios::binary) << text;
  }
  void Write(const std::string& file, const json& content) { WriteText(file, content.dump()); }
  void Patch(const std::string& file, const json& changes) {
    json content = json::parse(std::ifstream(root_ / file));
    for (const auto& [key, value] : changes.items()) content[key] = value;
    Write(file, content);
  }

  // Full-size videos, as the families' defaults are. After the Make functions.
  void AllowFullSize() {
    for (const char* file : {"transformer/config.json", "transformer_2/config.json"}) {
      if (std::filesystem::exists(root_ / file)) Patch(file, {{"rope_max_seq_len", 1024}});
    }
  }

  // Wan 2.2 A14B's structure.
  void MakeTwoExperts(double boundary_ratio) {
    json second = Transformer(16);
    second["num_layers"] = 3;
    Write("transformer_2/config.json", second);
    Patch("model_index.json", {{"boundary_ratio", boundary_ratio},
                               {"transformer_2", {"diffusers", "WanTransformer3DModel"}}});
  }

  // Wan 2.2 TI2V-5B's structure.
  void MakeTi2v() {
    Write("transformer/config.json", Transformer(48));
    Write("vae/config.json", {{"base_dim", 3},
                              {"z_dim", 48},
                              {"num_res_blocks", 1},
                              {"dim_mult", {1, 1, 1, 1}},
                              {"in_channels", 12},
                              {"out_channels", 12},
                              {"is_residual", true},
                              {"patch_size", 2},
                              {"scale_factor_spatial", 16},
                              {"latents_mean", std::vector<double>(48, 0.0)},
                              {"latents_std", std::vector<double>(48, 1.0)}});
    Patch("model_index.json", {{"expand_timesteps", true}, {"boundary_ratio", nullptr}});
    Patch("scheduler/scheduler_config.json", {{"flow_shift", 5.0}});
  }

 private:
  static json Transformer(int64_t channels) {
    return {{"num_attention_heads", 2}, {"attention_head_dim", 12}, {"in_channels", channels},
            {"out_channels", channels}, {"text_dim", 32},           {"ffn_dim", 32},
            {"num_layers", 2},          {"rope_max_seq_len", 32}};
  }

  std::filesystem::path root_;
};

}  // namespace dlo
