// The configurations of a Wan repository, read from its JSON files. Torch-free: the frontend and
// the forward code share them.
//
//   ASSIGN_OR_RETURN(WanConfig config, ReadWanConfig("/models/Wan2.1-T2V-1.3B-Diffusers"));
//
// Missing keys take diffusers' class defaults; unknown keys are ignored and logged once per file.
// Field names are those of the JSON keys. Source: diffusers 0.42 WanTransformer3DModel,
// AutoencoderKLWan, UniPCMultistepScheduler, FlowMatchEulerDiscreteScheduler, transformers 5
// UMT5Config.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace dlo {

struct WanTransformerConfig {
  std::array<int64_t, 3> patch_size = {1, 2, 2};  // frames, rows, columns
  int64_t num_attention_heads = 40;
  int64_t attention_head_dim = 128;
  int64_t in_channels = 16;
  int64_t out_channels = 16;
  int64_t text_dim = 4096;
  int64_t freq_dim = 256;
  int64_t ffn_dim = 13824;
  int64_t num_layers = 40;
  bool cross_attn_norm = true;
  double eps = 1e-6;
  int64_t rope_max_seq_len = 1024;

  int64_t hidden_size() const { return num_attention_heads * attention_head_dim; }
};

struct WanVaeConfig {
  int64_t base_dim = 96;
  std::optional<int64_t> decoder_base_dim;
  int64_t z_dim = 16;
  std::vector<int64_t> dim_mult = {1, 2, 4, 4};
  int64_t num_res_blocks = 2;
  std::vector<bool> temperal_downsample = {false, true, true};  // diffusers' spelling
  bool is_residual = false;                                     // Wan 2.2
  int64_t in_channels = 3;
  int64_t out_channels = 3;
  std::optional<int64_t> patch_size;  // Wan 2.2: 2
  int64_t scale_factor_temporal = 4;
  int64_t scale_factor_spatial = 8;
  std::vector<double> latents_mean;  // z_dim values
  std::vector<double> latents_std;   // z_dim values

  int64_t decoder_dim() const { return decoder_base_dim.value_or(base_dim); }
};

// These defaults are the encoder of the Wan repositories; a file's missing keys take UMT5Config's.
struct Umt5Config {
  int64_t vocab_size = 256384;
  int64_t d_model = 4096;
  int64_t d_kv = 64;
  int64_t d_ff = 10240;
  int64_t num_layers = 24;
  int64_t num_heads = 64;
  int64_t relative_attention_num_buckets = 32;
  int64_t relative_attention_max_distance = 128;
  double layer_norm_epsilon = 1e-6;
  int64_t pad_token_id = 0;
  int64_t eos_token_id = 1;
};

// How a solver spaces its noise levels.
enum class SigmaGrid {
  kUniPC,        // diffusers >= 0.37: u = linspace(1, 1/1000, n+1)[:-1], shifted once
  kUniPCLegacy,  // diffusers <= 0.36 and the original repository: u = linspace(0.999, 0, n+1)[:-1]
  kEuler,        // diffusers FlowMatchEulerDiscreteScheduler: shifted twice
  // Original Wan and lightx2v: u = linspace(1, 0, n+1)[:-1], shifted once, float timesteps.
  kEulerNative,
};

struct FlowSchedulerConfig {
  enum class Solver { kUniPC, kEuler };
  Solver solver = Solver::kUniPC;
  SigmaGrid grid = SigmaGrid::kUniPC;
  double shift = 1.0;  // flow_shift (UniPC) or shift (Euler)
  int num_train_timesteps = 1000;
  int solver_order = 2;                // UniPC: 1 or 2
  std::vector<int> disable_corrector;  // UniPC: steps without correction
};

struct WanConfig {
  WanTransformerConfig transformer;                   // the only one, or the high-noise expert
  std::optional<WanTransformerConfig> transformer_2;  // the low-noise expert (Wan 2.2 A14B)
  // Of num_train_timesteps; at or above it the first expert runs. Above 0 there are two experts.
  std::optional<double> boundary_ratio;
  bool expand_timesteps = false;  // Wan 2.2 TI2V: one timestep per token
  WanVaeConfig vae;
  Umt5Config text_encoder;
  FlowSchedulerConfig scheduler;
};

// Reads and checks model_index.json and every component's JSON. `root` is a diffusers repository.
// INVALID_ARGUMENT names file, key and value for a value that cannot run (a UniPC with solver_type
// bh1, heads that do not divide, ...), NOT_FOUND names a missing file, UNIMPLEMENTED a pipeline
// class that is not a Wan text-to-video one.
absl::StatusOr<WanConfig> ReadWanConfig(const std::filesystem::path& root);

}  // namespace dlo
