#include "models/wan/wan_config.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "spdlog/spdlog.h"

namespace dlo {
namespace {

using nlohmann::json;

// Bounds that no Wan model comes near; they keep every product of two of them, in bytes, inside
// int64_t.
constexpr int64_t kWidthMax = int64_t{1} << 20;  // heads * head dim, feed-forward and text widths
constexpr int64_t kChannelsMax = int64_t{1} << 14;  // latent and VAE channels
constexpr int64_t kLayersMax = 1024;
constexpr int64_t kVocabularyMax = int64_t{1} << 24;
constexpr int64_t kPatchMax = 16;
constexpr int64_t kPositionsMax = int64_t{1} << 20;
// Up to 1,000 steps, float32 keeps every two noise levels of every grid apart within these shifts;
// UniPC divides by their distance.
constexpr double kShiftMin = 0.01;
constexpr double kShiftMax = 100;

// AutoencoderKLWan's defaults: the statistics of the Wan 2.1 VAE.
const std::vector<double>& DefaultLatentsMean() {
  static const auto* const values = new std::vector<double>{
      -0.7571, -0.7089, -0.9113, 0.1075,  -0.1745, 0.9653,  -0.1517, 1.5508,
      0.4134,  -0.0715, 0.5517,  -0.3632, -0.1922, -0.9497, 0.2503,  -0.2921};
  return *values;
}

const std::vector<double>& DefaultLatentsStd() {
  static const auto* const values =
      new std::vector<double>{2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
                              3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160};
  return *values;
}

std::string Joined(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) absl::StrAppend(&out, out.empty() ? "" : " or ", name);
  return out;
}

// model_index.json: which class every component has, and the pipeline's own settings.
struct ModelIndex {
  std::string file;
  json document;

  // The class of a component, empty if it is absent ([null, null] or no key).
  // INVALID_ARGUMENT if it is not a [library, class] pair, UNIMPLEMENTED for a class that is not in
  // `supported`.
  absl::StatusOr<std::string> Component(absl::string_view name,
                                        const std::vector<std::string>& supported) const {
    const auto it = document.find(std::string(name));
    if (it == document.end()) return std::string();
    const bool pair = it->is_array() && it->size() == 2;
    if (pair && (*it)[0].is_null() && (*it)[1].is_null()) return std::string();
    if (!pair || !(*it)[0].is_string() || !(*it)[1].is_string()) {
      return absl::InvalidArgumentError(
          absl::StrCat(file, ": ", name, " is ", JsonExcerpt(*it),
                       ", but must be a pair [library, class], or [null, null] if it is absent"));
    }
    std::string class_name = (*it)[1].get<std::string>();
    for (const std::string& candidate : supported) {
      if (candidate == class_name) return class_name;
    }
    return absl::UnimplementedError(absl::StrCat(file, ": ", name, " is a ", JsonExcerpt((*it)[1]),
                                                 "; supported: ", Joined(supported)));
  }

  absl::StatusOr<std::string> RequiredComponent(absl::string_view name,
                                                const std::vector<std::string>& supported) const {
    ASSIGN_OR_RETURN(std::string class_name, Component(name, supported));
    if (class_name.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(file, ": the component ", name,
                                                     " is missing; a ", Joined(supported),
                                                     " is needed for text to video"));
    }
    return class_name;
  }
};

absl::StatusOr<ModelIndex> ReadModelIndex(const std::filesystem::path& root) {
  ModelIndex index;
  index.file = (root / "model_index.json").string();
  ASSIGN_OR_RETURN(index.document, ReadJsonFile(index.file));
  if (!index.document.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(index.file, ": must hold a JSON object"));
  }
  std::string class_name;
  if (const auto it = index.document.find("_class_name"); it != index.document.end()) {
    if (it->is_string()) class_name = it->get<std::string>();
  }
  if (class_name != "WanPipeline") {
    return absl::UnimplementedError(
        absl::StrCat(index.file, ": _class_name is ",
                     class_name.empty() ? "missing" : JsonExcerpt(json(class_name)),
                     "; supported: \"WanPipeline\" (Wan 2.1 T2V, Wan 2.2 T2V A14B, Wan 2.2 TI2V "
                     "as text to video)"));
  }
  return index;
}

absl::StatusOr<WanTransformerConfig> ReadTransformer(const std::filesystem::path& root,
                                                     const std::string& component) {
  const std::filesystem::path path = root / component / "config.json";
  ASSIGN_OR_RETURN(const json document, ReadJsonFile(path));
  JsonReader reader(path.string(), document);
  WanTransformerConfig config;

  std::vector<int64_t> patch(config.patch_size.begin(), config.patch_size.end());
  reader.IntList("patch_size", 1, kPatchMax, 3, &patch);
  if (patch.size() == 3) {
    config.patch_size = {patch[0], patch[1], patch[2]};
  } else {
    reader.Fail("patch_size", "must have 3 values: frames, rows, columns");
  }
  reader.Int("num_attention_heads", 1, 4096, &config.num_attention_heads);
  reader.Int("attention_head_dim", 1, 4096, &config.attention_head_dim);
  reader.Int("in_channels", 1, kChannelsMax, &config.in_channels);
  // null or 0 means in_channels, as in diffusers.
  std::optional<int64_t> out_channels = config.out_channels;
  reader.OptionalInt("out_channels", 0, kChannelsMax, &out_channels);
  config.out_channels =
      out_channels.value_or(0) == 0 ? config.in_channels : out_channels.value_or(0);
  reader.Int("text_dim", 1, kWidthMax, &config.text_dim);
  reader.Int("freq_dim", 2, kWidthMax, &config.freq_dim);
  reader.Int("ffn_dim", 1, kWidthMax, &config.ffn_dim);
  reader.Int("num_layers", 1, kLayersMax, &config.num_layers);
  reader.Bool("cross_attn_norm", &config.cross_attn_norm);
  reader.Double("eps", 1e-12, 0.1, &config.eps);
  reader.Int("rope_max_seq_len", 1, kPositionsMax, &config.rope_max_seq_len);
  // diffusers does not branch on qk_norm: every attention has both norms.
  reader.Ignore({"qk_norm"});

  constexpr absl::string_view kTextToVideoOnly =
      "this is an image-to-video transformer, which is not supported; use a text-to-video model";
  for (const absl::string_view key : {"image_dim", "added_kv_proj_dim", "pos_embed_seq_len"}) {
    reader.Require(key, {nullptr}, nullptr, kTextToVideoOnly);
  }

  // 3-axis rotary embedding: rows and columns take 2 * (d / 6) channels each, frames the rest, all
  // in pairs.
  if (config.attention_head_dim % 2 != 0 || config.attention_head_dim < 6) {
    reader.Fail("attention_head_dim", absl::StrCat("is ", config.attention_head_dim,
                                                   ", but must be even and at least 6: rotary "
                                                   "embedding splits it into pairs over 3 axes"));
  }
  if (config.hidden_size() > kWidthMax) {
    reader.Fail("num_attention_heads",
                absl::StrCat("times attention_head_dim is ", config.hidden_size(),
                             ", but must be at most ", kWidthMax));
  }
  if (config.freq_dim % 2 != 0) {
    reader.Fail("freq_dim", absl::StrCat("is ", config.freq_dim, ", but must be even"));
  }
  if (config.out_channels != config.in_channels) {
    reader.Fail("out_channels",
                absl::StrCat("is ", config.out_channels, ", but must equal in_channels, ",
                             config.in_channels, ": ", kTextToVideoOnly));
  }
  RETURN_IF_ERROR(reader.Finish());
  return config;
}

// What the decoder and encoder of AutoencoderKLWan need so that the layers of one stage fit those
// of the next.
void CheckVaeShapes(const WanVaeConfig& config, JsonReader& reader) {
  const size_t stages = config.dim_mult.size();
  if (stages == 0) return reader.Fail("dim_mult", "must have at least one value");
  if (config.temperal_downsample.size() != stages - 1) {
    return reader.Fail(
        "temperal_downsample",
        absl::StrCat("has ", config.temperal_downsample.size(), " values, but must have ",
                     stages - 1, ", one less than dim_mult"));
  }
  int64_t temporal = 1;
  for (const bool down : config.temperal_downsample) temporal *= down ? 2 : 1;
  const int64_t spatial = (int64_t{1} << (stages - 1)) * config.patch_size.value_or(1);
  if (config.scale_factor_temporal != temporal) {
    reader.Fail("scale_factor_temporal", absl::StrCat("is ", config.scale_factor_temporal,
                                                      ", but temperal_downsample makes ", temporal,
                                                      " frames from one latent frame"));
  }
  if (config.scale_factor_spatial != spatial) {
    reader.Fail("scale_factor_spatial", absl::StrCat("is ", config.scale_factor_spatial,
                                                     ", but dim_mult and patch_size make ", spatial,
                                                     " pixels from one latent pixel"));
  }
  const int64_t rgb = 3 * config.patch_size.value_or(1) * config.patch_size.value_or(1);
  for (const auto& [key, channels] : {std::pair{"in_channels", config.in_channels},
                                      std::pair{"out_channels", config.out_channels}}) {
    if (channels != rgb) {
      reader.Fail(key, absl::StrCat("is ", channels, ", but must be ", rgb,
                                    ": 3 colours times patch_size squared"));
    }
  }
  for (const int64_t mult : config.dim_mult) {
    if (mult * std::max(config.base_dim, config.decoder_dim()) > kChannelsMax) {
      reader.Fail("dim_mult", absl::StrCat("times base_dim or decoder_base_dim is over ",
                                           kChannelsMax, " channels"));
      return;
    }
  }
  if (!config.is_residual) return;
  // The parameterless shortcuts repeat (DupUp3D) or average (AvgDown3D) whole groups of channels.
  for (size_t i = 0; i + 1 < stages; ++i) {
    const int64_t factor = config.temperal_downsample[i] ? 8 : 4;
    const int64_t narrow_down = (i == 0 ? 1 : config.dim_mult[i - 1]) * config.base_dim;
    const int64_t wide_down = config.dim_mult[i] * config.base_dim;
    if (narrow_down * factor % wide_down != 0) {
      reader.Fail("dim_mult",
                  absl::StrCat("and base_dim do not divide: the encoder's stage ", i, " averages ",
                               narrow_down * factor, " channels into ", wide_down));
    }
    // Decoder stage i takes its width from the multiplier before the last i ones, and reverses
    // temperal_downsample.
    const int64_t in = config.dim_mult[stages - 1 - (i == 0 ? 0 : i - 1)] * config.decoder_dim();
    const int64_t out = config.dim_mult[stages - 1 - i] * config.decoder_dim();
    const int64_t up_factor = config.temperal_downsample[stages - 2 - i] ? 8 : 4;
    if (out * up_factor % in != 0) {
      reader.Fail("dim_mult",
                  absl::StrCat("and decoder_base_dim do not divide: the decoder's stage ", i,
                               " repeats ", in, " channels into ", out * up_factor));
    }
  }
}

absl::StatusOr<WanVaeConfig> ReadVae(const std::filesystem::path& root) {
  const std::filesystem::path path = root / "vae" / "config.json";
  ASSIGN_OR_RETURN(const json document, ReadJsonFile(path));
  JsonReader reader(path.string(), document);
  WanVaeConfig config;
  config.latents_mean = DefaultLatentsMean();
  config.latents_std = DefaultLatentsStd();

  reader.Int("base_dim", 1, kChannelsMax, &config.base_dim);
  reader.OptionalInt("decoder_base_dim", 1, kChannelsMax, &config.decoder_base_dim);
  reader.Int("z_dim", 1, kChannelsMax, &config.z_dim);
  reader.IntList("dim_mult", 1, 1024, 8, &config.dim_mult);
  reader.Int("num_res_blocks", 1, 64, &config.num_res_blocks);
  reader.BoolList("temperal_downsample", 8, &config.temperal_downsample);
  reader.Bool("is_residual", &config.is_residual);
  reader.Int("in_channels", 1, kChannelsMax, &config.in_channels);
  reader.Int("out_channels", 1, kChannelsMax, &config.out_channels);
  reader.OptionalInt("patch_size", 1, kPatchMax, &config.patch_size);
  reader.Int("scale_factor_temporal", 1, 256, &config.scale_factor_temporal);
  reader.Int("scale_factor_spatial", 1, 4096, &config.scale_factor_spatial);
  const size_t latents_max = static_cast<size_t>(kChannelsMax);
  reader.DoubleList("latents_mean", -1e6, 1e6, latents_max, &config.latents_mean);
  reader.DoubleList("latents_std", 1e-6, 1e6, latents_max, &config.latents_std);
  reader.Require("attn_scales", {json::array()}, json::array(),
                 "attention inside the encoder's stages is not supported");
  reader.Ignore({"dropout", "clip_output"});

  CheckVaeShapes(config, reader);
  for (const auto& [key, values] : {std::pair{"latents_mean", &config.latents_mean},
                                    std::pair{"latents_std", &config.latents_std}}) {
    if (static_cast<int64_t>(values->size()) != config.z_dim) {
      reader.Fail(key, absl::StrCat(reader.has(key) ? "has " : "is missing, and its default has ",
                                    values->size(), " values, but must have ", config.z_dim,
                                    ", one for each of z_dim channels"));
    }
  }
  RETURN_IF_ERROR(reader.Finish());
  return config;
}

absl::StatusOr<Umt5Config> ReadTextEncoder(const std::filesystem::path& root) {
  const std::filesystem::path path = root / "text_encoder" / "config.json";
  ASSIGN_OR_RETURN(const json document, ReadJsonFile(path));
  JsonReader reader(path.string(), document);
  // UMT5Config's class defaults are those of umt5-small; the header's are the encoder that the Wan
  // repositories carry.
  Umt5Config config;
  config.vocab_size = 250112;
  config.d_model = 512;
  config.d_ff = 1024;
  config.num_layers = 8;
  config.num_heads = 6;

  reader.Require("model_type", {"umt5"}, "umt5",
                 "plain T5 shares one position bias over all blocks and is not supported");
  reader.Require("architectures",
                 {json::array({"UMT5EncoderModel"}), json::array({"UMT5ForConditionalGeneration"}),
                  json::array({"UMT5Model"}), nullptr},
                 nullptr, "only UMT5 encoders are supported");
  reader.Require("feed_forward_proj", {"gated-gelu"}, "gated-gelu",
                 "only the gated feed-forward is supported");
  reader.Require("dense_act_fn", {"gelu_new"}, "gelu_new", "");
  reader.Require("is_gated_act", {true}, true, "");
  reader.Int("vocab_size", 1, kVocabularyMax, &config.vocab_size);
  reader.Int("d_model", 1, kWidthMax, &config.d_model);
  reader.Int("d_kv", 1, 4096, &config.d_kv);
  reader.Int("d_ff", 1, kWidthMax, &config.d_ff);
  reader.Int("num_layers", 1, kLayersMax, &config.num_layers);
  reader.Int("num_heads", 1, 4096, &config.num_heads);
  reader.Int("relative_attention_num_buckets", 4, 65536, &config.relative_attention_num_buckets);
  reader.Int("relative_attention_max_distance", 2, kPositionsMax,
             &config.relative_attention_max_distance);
  reader.Double("layer_norm_epsilon", 1e-12, 0.1, &config.layer_norm_epsilon);
  reader.Int("pad_token_id", 0, kVocabularyMax - 1, &config.pad_token_id);
  reader.Int("eos_token_id", 0, kVocabularyMax - 1, &config.eos_token_id);
  // What training, the decoder, generation and the loading libraries use. The dtype of the file
  // decides nothing: tensors are cast.
  reader.Ignore({"torch_dtype", "dtype", "transformers_version", "dropout_rate",
                 "classifier_dropout", "initializer_factor", "is_decoder", "is_encoder_decoder",
                 "num_decoder_layers", "decoder_start_token_id", "use_cache", "output_past",
                 "scalable_attention", "tie_word_embeddings", "tokenizer_class",
                 "scale_decoder_outputs"});

  if (config.num_heads * config.d_kv > kWidthMax) {
    reader.Fail("num_heads", absl::StrCat("times d_kv is ", config.num_heads * config.d_kv,
                                          ", but must be at most ", kWidthMax));
  }
  // Half of the buckets for each direction, half of those for exact distances.
  if (config.relative_attention_num_buckets % 4 != 0) {
    reader.Fail("relative_attention_num_buckets",
                absl::StrCat("is ", config.relative_attention_num_buckets,
                             ", but must be a multiple of 4"));
  }
  if (config.relative_attention_max_distance <= config.relative_attention_num_buckets / 4) {
    reader.Fail("relative_attention_max_distance",
                absl::StrCat("is ", config.relative_attention_max_distance,
                             ", but must be more than a quarter of "
                             "relative_attention_num_buckets, ",
                             config.relative_attention_num_buckets));
  }
  for (const auto& [key, id] : {std::pair{"pad_token_id", config.pad_token_id},
                                std::pair{"eos_token_id", config.eos_token_id}}) {
    if (id >= config.vocab_size) {
      reader.Fail(key,
                  absl::StrCat("is ", id, ", but must be below vocab_size, ", config.vocab_size));
    }
  }
  RETURN_IF_ERROR(reader.Finish());
  return config;
}

void ReadUniPC(JsonReader& reader, FlowSchedulerConfig& config) {
  config.solver = FlowSchedulerConfig::Solver::kUniPC;
  config.grid = SigmaGrid::kUniPC;
  reader.Double("flow_shift", kShiftMin, kShiftMax, &config.shift);
  int64_t solver_order = 2;
  reader.Int("solver_order", 1, 2, &solver_order);
  config.solver_order = static_cast<int>(solver_order);
  std::vector<int64_t> disabled;
  reader.IntList("disable_corrector", 0, 100000, 100000, &disabled);
  config.disable_corrector.assign(disabled.begin(), disabled.end());

  reader.Require("prediction_type", {"flow_prediction"}, "epsilon",
                 "only flow-matching models are supported");
  reader.Require("use_flow_sigmas", {true}, false, "only flow-matching models are supported");
  reader.Require("solver_type", {"bh2"}, "bh2", "bh1 gives NaN in flow mode");
  reader.Require("final_sigmas_type", {"zero"}, "zero", "sigma_min gives NaN in flow mode");
  reader.Require("lower_order_final", {true}, true, "the last step would be infinite in flow mode");
  reader.Require("predict_x0", {true}, true, "");
  reader.Require("solver_p", {nullptr}, nullptr, "a predictor of its own is not supported");
  reader.Require("thresholding", {false}, false, "thresholding is not supported");
  reader.Ignore({"beta_start", "beta_end", "beta_schedule", "trained_betas",
                 "dynamic_thresholding_ratio", "sample_max_value", "timestep_spacing",
                 "steps_offset", "rescale_betas_zero_snr", "sigma_min", "sigma_max"});
}

void ReadEuler(JsonReader& reader, FlowSchedulerConfig& config) {
  config.solver = FlowSchedulerConfig::Solver::kEuler;
  config.grid = SigmaGrid::kEuler;
  reader.Double("shift", kShiftMin, kShiftMax, &config.shift);
  reader.Require("invert_sigmas", {false}, false, "inverted noise levels are not supported");
  reader.Require("stochastic_sampling", {false}, false, "stochastic sampling is not supported");
  reader.Ignore({"base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len"});
}

absl::StatusOr<FlowSchedulerConfig> ReadScheduler(const std::filesystem::path& root,
                                                  const std::string& class_name) {
  const std::filesystem::path path = root / "scheduler" / "scheduler_config.json";
  ASSIGN_OR_RETURN(const json document, ReadJsonFile(path));
  JsonReader reader(path.string(), document);
  FlowSchedulerConfig config;
  int64_t train_timesteps = 1000;
  reader.Int("num_train_timesteps", 2, 100000, &train_timesteps);
  config.num_train_timesteps = static_cast<int>(train_timesteps);
  if (class_name == "UniPCMultistepScheduler") {
    ReadUniPC(reader, config);
  } else {
    ReadEuler(reader, config);
  }
  reader.Require("use_dynamic_shifting", {false}, false, "dynamic shifting is not supported");
  reader.Require("shift_terminal", {nullptr, 0}, nullptr, "a terminal shift is not supported");
  for (const absl::string_view key :
       {"use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"}) {
    reader.Require(key, {false}, false, "only flow sigmas are supported");
  }
  reader.Ignore({"time_shift_type"});
  RETURN_IF_ERROR(reader.Finish());
  return config;
}

// The latents go from noise through every expert into the VAE, and the text through the encoder
// into every expert.
absl::Status CheckTogether(const std::filesystem::path& root, const std::string& component,
                           const WanTransformerConfig& transformer, const WanConfig& config) {
  const std::string file = (root / component / "config.json").string();
  if (transformer.in_channels != config.vae.z_dim) {
    return absl::InvalidArgumentError(absl::StrCat(
        file, ": in_channels is ", transformer.in_channels, ", but must equal z_dim of the VAE, ",
        config.vae.z_dim, ": more channels carry an image, and image to video is not supported"));
  }
  if (transformer.text_dim != config.text_encoder.d_model) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": text_dim is ", transformer.text_dim,
                                                   ", but must equal d_model of the text encoder, ",
                                                   config.text_encoder.d_model));
  }
  if (transformer.patch_size != config.transformer.patch_size) {
    return absl::InvalidArgumentError(
        absl::StrCat(file, ": patch_size must equal that of the first transformer"));
  }
  if (transformer.patch_size[0] != 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        file, ": patch_size is ", transformer.patch_size[0], " over frames, but must be 1"));
  }
  if (config.expand_timesteps &&
      (transformer.patch_size[1] != 2 || transformer.patch_size[2] != 2)) {
    return absl::InvalidArgumentError(absl::StrCat(
        file, ": patch_size must be [1, 2, 2] in a model with expand_timesteps, but is [1, ",
        transformer.patch_size[1], ", ", transformer.patch_size[2], "]"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<WanConfig> ReadWanConfig(const std::filesystem::path& root) {
  ASSIGN_OR_RETURN(const ModelIndex index, ReadModelIndex(root));
  WanConfig config;

  JsonReader reader(index.file, index.document);
  reader.OptionalDouble("boundary_ratio", 0.0, 1.0, &config.boundary_ratio);
  reader.Bool("expand_timesteps", &config.expand_timesteps);
  reader.Ignore({"scheduler", "text_encoder", "tokenizer", "transformer", "transformer_2", "vae"});
  RETURN_IF_ERROR(reader.Finish());

  const std::vector<std::string> transformer_classes = {"WanTransformer3DModel"};
  RETURN_IF_ERROR(index.RequiredComponent("transformer", transformer_classes).status());
  RETURN_IF_ERROR(index.RequiredComponent("vae", {"AutoencoderKLWan"}).status());
  RETURN_IF_ERROR(index.RequiredComponent("text_encoder", {"UMT5EncoderModel"}).status());
  RETURN_IF_ERROR(
      index
          .RequiredComponent("tokenizer", {"T5TokenizerFast", "T5Tokenizer",
                                           "PreTrainedTokenizerFast", "TokenizersBackend"})
          .status());
  ASSIGN_OR_RETURN(const std::string scheduler_class,
                   index.RequiredComponent("scheduler", {"UniPCMultistepScheduler",
                                                         "FlowMatchEulerDiscreteScheduler"}));
  ASSIGN_OR_RETURN(const std::string transformer_2_class,
                   index.Component("transformer_2", transformer_classes));

  ASSIGN_OR_RETURN(config.transformer, ReadTransformer(root, "transformer"));
  ASSIGN_OR_RETURN(config.vae, ReadVae(root));
  ASSIGN_OR_RETURN(config.text_encoder, ReadTextEncoder(root));
  ASSIGN_OR_RETURN(config.scheduler, ReadScheduler(root, scheduler_class));
  RETURN_IF_ERROR(CheckTogether(root, "transformer", config.transformer, config));

  // Every timestep is at or above a boundary of 0, so the second expert would never run.
  const bool two_experts = config.boundary_ratio.value_or(0) > 0;
  if (two_experts) {
    if (transformer_2_class.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          index.file, ": boundary_ratio is ", *config.boundary_ratio,
          ", so the component transformer_2 (the low-noise expert) is needed, but it is absent"));
    }
    ASSIGN_OR_RETURN(config.transformer_2, ReadTransformer(root, "transformer_2"));
    RETURN_IF_ERROR(CheckTogether(root, "transformer_2", *config.transformer_2, config));
  } else if (!transformer_2_class.empty()) {
    spdlog::info(
        "{}: transformer_2 never runs without a boundary_ratio above 0, so it is not loaded",
        index.file);
  }
  return config;
}

}  // namespace dlo
