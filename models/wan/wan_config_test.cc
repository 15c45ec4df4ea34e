#include "models/wan/wan_config.h"

#include <filesystem>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "models/wan/wan_test_repository.h"

namespace dlo {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

TEST(WanConfigTest, ReadsTheDemoModel) {
  const absl::StatusOr<WanConfig> config = ReadWanConfig(DLO_SOURCE_DIR "/assets/shapes");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->transformer.hidden_size(), 192);
  EXPECT_EQ(config->transformer.num_layers, 8);
  EXPECT_EQ(config->transformer.text_dim, 128);
  EXPECT_EQ(config->vae.base_dim, 16);
  EXPECT_EQ(config->vae.dim_mult, (std::vector<int64_t>{1, 1, 2, 3}));
  EXPECT_EQ(config->vae.num_res_blocks, 1);
  EXPECT_DOUBLE_EQ(config->vae.latents_mean[0], 0.3815);
  EXPECT_DOUBLE_EQ(config->vae.latents_std[15], 1.22914);
  EXPECT_EQ(config->text_encoder.vocab_size, 256);
  EXPECT_EQ(config->text_encoder.num_layers, 2);
  EXPECT_EQ(config->scheduler.solver, FlowSchedulerConfig::Solver::kUniPC);
  EXPECT_DOUBLE_EQ(config->scheduler.shift, 3.0);
  EXPECT_FALSE(config->transformer_2.has_value());
  EXPECT_FALSE(config->boundary_ratio.has_value());
}

TEST(WanConfigTest, MissingKeysTakeTheClassDefaults) {
  WanTestRepository repository;
  repository.Write("transformer/config.json", json::object());
  repository.Write("vae/config.json", json::object());
  repository.Write("text_encoder/config.json", {{"d_model", 4096}});
  const absl::StatusOr<WanConfig> config = ReadWanConfig(repository.root());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->transformer.hidden_size(), 5120);
  EXPECT_EQ(config->transformer.ffn_dim, 13824);
  EXPECT_EQ(config->transformer.rope_max_seq_len, 1024);
  EXPECT_TRUE(config->transformer.cross_attn_norm);
  EXPECT_EQ(config->vae.z_dim, 16);
  EXPECT_EQ(config->vae.decoder_dim(), 96);
  EXPECT_DOUBLE_EQ(config->vae.latents_mean[7], 1.5508);
  EXPECT_DOUBLE_EQ(config->vae.latents_std[8], 3.2687);
  EXPECT_EQ(config->text_encoder.vocab_size, 250112);
  EXPECT_EQ(config->text_encoder.num_heads, 6);
}

TEST(WanConfigTest, UnknownKeysAreIgnored) {
  WanTestRepository repository;
  repository.Patch("transformer/config.json", {{"window_size", {-1, -1}}, {"add_img_emb", false}});
  repository.Patch("model_index.json", {{"some_setting", 3}});
  EXPECT_TRUE(ReadWanConfig(repository.root()).ok());
}

TEST(WanConfigTest, ReadsTheOtherFamilies) {
  WanTestRepository a14b;
  a14b.MakeTwoExperts(0.875);
  const absl::StatusOr<WanConfig> two = ReadWanConfig(a14b.root());
  ASSERT_TRUE(two.ok()) << two.status();
  ASSERT_TRUE(two->transformer_2.has_value());
  EXPECT_EQ(two->transformer_2->num_layers, 3);
  EXPECT_DOUBLE_EQ(*two->boundary_ratio, 0.875);

  WanTestRepository ti2v;
  ti2v.MakeTi2v();
  const absl::StatusOr<WanConfig> five = ReadWanConfig(ti2v.root());
  ASSERT_TRUE(five.ok()) << five.status();
  EXPECT_TRUE(five->expand_timesteps);
  EXPECT_TRUE(five->vae.is_residual);
  EXPECT_EQ(five->vae.patch_size, 2);
  EXPECT_EQ(five->vae.scale_factor_spatial, 16);
}

TEST(WanConfigTest, TheSecondExpertIsReadExactlyWhenItCanRun) {
  WanTestRepository repository;
  repository.MakeTwoExperts(0.0);
  EXPECT_FALSE(ReadWanConfig(repository.root())->transformer_2.has_value());
  repository.MakeTwoExperts(1.0);
  EXPECT_TRUE(ReadWanConfig(repository.root())->transformer_2.has_value());
  repository.Patch("model_index.json", {{"boundary_ratio", nullptr}});
  EXPECT_FALSE(ReadWanConfig(repository.root())->transformer_2.has_value());
  repository.Patch("model_index.json",
                   {{"boundary_ratio", 0.5}, {"transformer_2", {nullptr, nullptr}}});
  EXPECT_THAT(ReadWanConfig(repository.root()).status().message(),
              HasSubstr("boundary_ratio is 0.5, so the component transformer_2"));
  repository.Patch("model_index.json", {{"boundary_ratio", 0}});
  EXPECT_TRUE(ReadWanConfig(repository.root()).ok());
}

TEST(WanConfigTest, ReadsTheEulerScheduler) {
  WanTestRepository repository;
  repository.Patch("model_index.json",
                   {{"scheduler", {"diffusers", "FlowMatchEulerDiscreteScheduler"}}});
  repository.Write("scheduler/scheduler_config.json", {{"shift", 7.0}});
  const absl::StatusOr<WanConfig> config = ReadWanConfig(repository.root());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->scheduler.solver, FlowSchedulerConfig::Solver::kEuler);
  EXPECT_EQ(config->scheduler.grid, SigmaGrid::kEuler);
  EXPECT_DOUBLE_EQ(config->scheduler.shift, 7.0);
}

struct Refusal {
  const char* file;
  const char* key;
  json value;
  absl::StatusCode code;
  const char* says;
};

void PrintTo(const Refusal& refusal, std::ostream* out) {
  *out << refusal.file << " " << refusal.key << "=" << refusal.value.dump();
}

class WanConfigRefusalTest : public ::testing::TestWithParam<Refusal> {};

TEST_P(WanConfigRefusalTest, NamesFileKeyAndValue) {
  const Refusal& refusal = GetParam();
  WanTestRepository repository;
  repository.Patch(refusal.file, {{refusal.key, refusal.value}});
  const absl::Status status = ReadWanConfig(repository.root()).status();
  EXPECT_EQ(status.code(), refusal.code) << status;
  EXPECT_THAT(status.message(), HasSubstr(refusal.file));
  EXPECT_THAT(status.message(), HasSubstr(refusal.key));
  EXPECT_THAT(status.message(), HasSubstr(refusal.says));
}

constexpr char kIndex[] = "model_index.json";
constexpr char kTransformer[] = "transformer/config.json";
constexpr char kVae[] = "vae/config.json";
constexpr char kText[] = "text_encoder/config.json";
constexpr char kScheduler[] = "scheduler/scheduler_config.json";
constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
constexpr absl::StatusCode kUnsupported = absl::StatusCode::kUnimplemented;

INSTANTIATE_TEST_SUITE_P(
    All, WanConfigRefusalTest,
    ::testing::Values(
        Refusal{kIndex, "_class_name", "WanImageToVideoPipeline", kUnsupported, "\"WanPipeline\""},
        Refusal{kIndex, "_class_name", 3, kUnsupported, "missing"},
        Refusal{kIndex, "transformer", json::array({nullptr, nullptr}), kInvalid, "is missing"},
        Refusal{kIndex,
                "transformer",
                {"diffusers", "FluxTransformer2DModel"},
                kUnsupported,
                "WanTransformer3DModel"},
        Refusal{kIndex, "vae", "AutoencoderKLWan", kInvalid, "a pair"},
        Refusal{kIndex, "vae", {1, 2}, kInvalid, "a pair"},
        Refusal{kIndex,
                "text_encoder",
                {"transformers", "T5EncoderModel"},
                kUnsupported,
                "UMT5EncoderModel"},
        Refusal{kIndex,
                "scheduler",
                {"diffusers", "DDIMScheduler"},
                kUnsupported,
                "UniPCMultistepScheduler or FlowMatchEulerDiscreteScheduler"},
        Refusal{kIndex, "boundary_ratio", 1.5, kInvalid, "from 0 to 1"},
        Refusal{kIndex, "boundary_ratio", "0.5", kInvalid, "a number"},
        Refusal{kIndex, "expand_timesteps", 1, kInvalid, "true or false"},
        Refusal{kTransformer, "num_layers", 0, kInvalid, "is 0, but must be an integer from 1"},
        Refusal{kTransformer, "num_layers", -3, kInvalid, "is -3"},
        Refusal{kTransformer, "num_layers", 2.0, kInvalid, "is 2.0, but must be an integer"},
        Refusal{kTransformer, "num_layers", "30", kInvalid, "is \"30\""},
        Refusal{kTransformer, "num_layers", nullptr, kInvalid, "is null"},
        Refusal{kTransformer, "ffn_dim", 18446744073709551615u, kInvalid, "18446744073709551615"},
        Refusal{kTransformer, "ffn_dim", int64_t{1} << 40, kInvalid, "1099511627776"},
        Refusal{kTransformer, "num_attention_heads", 4097, kInvalid, "must be an integer"},
        Refusal{kTransformer, "attention_head_dim", 13, kInvalid, "must be even"},
        Refusal{kTransformer, "attention_head_dim", 4, kInvalid, "at least 6"},
        Refusal{kTransformer, "freq_dim", 255, kInvalid, "must be even"},
        Refusal{kTransformer, "patch_size", {1, 2}, kInvalid, "3 values"},
        Refusal{kTransformer, "patch_size", {1, 2, 2, 2}, kInvalid, "at most 3"},
        Refusal{kTransformer, "patch_size", {1, 0, 2}, kInvalid, "is 0"},
        Refusal{kTransformer, "patch_size", 2, kInvalid, "a list"},
        Refusal{kTransformer, "patch_size", {2, 2, 2}, kInvalid, "must be 1"},
        Refusal{kTransformer, "eps", -1e-6, kInvalid, "a number"},
        Refusal{kTransformer, "cross_attn_norm", "yes", kInvalid, "true or false"},
        Refusal{kTransformer, "image_dim", 1280, kInvalid, "image-to-video"},
        Refusal{kTransformer, "added_kv_proj_dim", 5120, kInvalid, "image-to-video"},
        Refusal{kTransformer, "pos_embed_seq_len", 514, kInvalid, "image-to-video"},
        Refusal{kTransformer, "in_channels", 36, kInvalid, "image"},
        Refusal{kTransformer, "text_dim", 4096, kInvalid, "d_model of the text encoder, 32"},
        Refusal{kVae, "z_dim", 48, kInvalid, "latents_mean is missing, and its default has 16"},
        Refusal{kVae, "latents_std", {1, 2}, kInvalid, "has 2 values, but must have 16"},
        Refusal{kVae, "latents_std", std::vector<double>(16, 0.0), kInvalid, "is 0.0"},
        Refusal{kVae, "dim_mult", {1, 2, 4}, kInvalid, "temperal_downsample"},
        Refusal{kVae, "dim_mult", json::array(), kInvalid, "at least one"},
        Refusal{kVae, "dim_mult", {1, 1, 1, 2000}, kInvalid, "is 2000"},
        Refusal{kVae, "decoder_base_dim", 0, kInvalid, "from 1"},
        Refusal{kVae, "temperal_downsample", {false, true, 1}, kInvalid, "true and false"},
        Refusal{kVae, "temperal_downsample", {true, true, true}, kInvalid, "8 frames"},
        Refusal{kVae, "scale_factor_spatial", 16, kInvalid, "8 pixels"},
        Refusal{kVae, "patch_size", 2, kInvalid, "must be 12"},
        Refusal{kVae, "attn_scales", {0.5}, kInvalid, "must be []"},
        Refusal{kText, "model_type", "t5", kInvalid, "shares one position bias"},
        Refusal{kText, "architectures", {"T5EncoderModel"}, kInvalid, "UMT5"},
        Refusal{kText, "feed_forward_proj", "relu", kInvalid, "gated"},
        Refusal{kText, "dense_act_fn", "relu", kInvalid, "gelu_new"},
        Refusal{kText, "num_heads", 0, kInvalid, "from 1"},
        Refusal{kText, "relative_attention_num_buckets", 6, kInvalid, "multiple of 4"},
        Refusal{kText, "relative_attention_max_distance", 8, kInvalid, "a quarter"},
        Refusal{kText, "eos_token_id", 99999999, kInvalid, "eos_token_id"},
        Refusal{kText, "eos_token_id", 500, kInvalid, "below vocab_size"},
        Refusal{kScheduler, "solver_type", "bh1", kInvalid, "bh1 gives NaN"},
        Refusal{kScheduler, "final_sigmas_type", "sigma_min", kInvalid, "sigma_min gives NaN"},
        Refusal{kScheduler, "lower_order_final", false, kInvalid, "infinite"},
        Refusal{kScheduler, "prediction_type", "epsilon", kInvalid, "flow_prediction"},
        Refusal{kScheduler, "use_flow_sigmas", false, kInvalid, "flow"},
        Refusal{kScheduler, "use_karras_sigmas", true, kInvalid, "flow sigmas"},
        Refusal{kScheduler, "use_exponential_sigmas", true, kInvalid, "flow sigmas"},
        Refusal{kScheduler, "use_beta_sigmas", true, kInvalid, "flow sigmas"},
        Refusal{kScheduler, "use_dynamic_shifting", true, kInvalid, "dynamic"},
        Refusal{kScheduler, "shift_terminal", 0.1, kInvalid, "terminal"},
        Refusal{kScheduler, "thresholding", true, kInvalid, "thresholding"},
        Refusal{kScheduler, "predict_x0", false, kInvalid, "predict_x0"},
        Refusal{kScheduler, "solver_p", {{"a", 1}}, kInvalid, "predictor"},
        Refusal{kScheduler, "solver_order", 3, kInvalid, "from 1 to 2"},
        Refusal{kScheduler, "flow_shift", 0.0, kInvalid, "flow_shift is 0.0"},
        Refusal{kScheduler, "flow_shift", "3", kInvalid, "a number"},
        Refusal{kScheduler, "disable_corrector", {-1}, kInvalid, "is -1"},
        Refusal{kScheduler, "num_train_timesteps", 1, kInvalid, "from 2"}));

TEST(WanConfigTest, AFlowSchedulerMustSaySoInItsFile) {
  WanTestRepository repository;
  repository.Write("scheduler/scheduler_config.json", json::object());
  const absl::Status status = ReadWanConfig(repository.root()).status();
  EXPECT_THAT(status.message(),
              HasSubstr("prediction_type is \"epsilon\" (the default, as the key"));
  EXPECT_THAT(status.message(), HasSubstr("use_flow_sigmas"));
}

TEST(WanConfigTest, TheEulerSchedulerRefusesWhatItCannotDo) {
  for (const char* key : {"use_dynamic_shifting", "invert_sigmas", "stochastic_sampling",
                          "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"}) {
    WanTestRepository repository;
    repository.Patch("model_index.json",
                     {{"scheduler", {"diffusers", "FlowMatchEulerDiscreteScheduler"}}});
    repository.Write("scheduler/scheduler_config.json", {{"shift", 7.0}, {key, true}});
    EXPECT_THAT(ReadWanConfig(repository.root()).status().message(),
                HasSubstr(std::string(key) + " is true"));
  }
}

TEST(WanConfigTest, ResidualVaeWidthsMustDivide) {
  WanTestRepository repository;
  repository.MakeTi2v();
  repository.Patch("vae/config.json", {{"dim_mult", {1, 7, 4, 4}}});
  EXPECT_THAT(ReadWanConfig(repository.root()).status().message(), HasSubstr("do not divide"));
}

TEST(WanConfigTest, ProductsOfWidthsAreBounded) {
  WanTestRepository repository;
  repository.Patch("transformer/config.json",
                   {{"num_attention_heads", 4096}, {"attention_head_dim", 4096}});
  EXPECT_THAT(ReadWanConfig(repository.root()).status().message(),
              HasSubstr("times attention_head_dim is 16777216"));
  WanTestRepository vae;
  vae.Patch("vae/config.json", {{"base_dim", 1000}, {"dim_mult", {1, 1, 1, 1000}}});
  EXPECT_THAT(ReadWanConfig(vae.root()).status().message(), HasSubstr("channels"));
}

TEST(WanConfigTest, AllWrongKeysOfAFileAreReportedAtOnce) {
  WanTestRepository repository;
  repository.Patch("transformer/config.json", {{"num_layers", 0}, {"ffn_dim", -1}});
  const absl::Status status = ReadWanConfig(repository.root()).status();
  EXPECT_THAT(status.message(), HasSubstr("num_layers is 0"));
  EXPECT_THAT(status.message(), HasSubstr("ffn_dim is -1"));
}

TEST(WanConfigTest, MissingFilesAreNotFound) {
  for (const char* file : {"model_index.json", "transformer/config.json", "vae/config.json",
                           "text_encoder/config.json", "scheduler/scheduler_config.json"}) {
    WanTestRepository repository;
    std::filesystem::remove(repository.root() / file);
    const absl::Status status = ReadWanConfig(repository.root()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
    EXPECT_THAT(status.message(), HasSubstr(file));
  }
  EXPECT_EQ(ReadWanConfig("/nowhere").status().code(), absl::StatusCode::kNotFound);
}

TEST(WanConfigTest, HostileFilesAreErrors) {
  const std::string deep(100000, '[');
  for (const std::string& text :
       {std::string(), std::string("[]"), std::string("{"), std::string("nul"), std::string("3"),
        std::string("{\"num_layers\": NaN}"), std::string("{\"num_layers\": 1e999}"),
        std::string("{\"a\": \"\xff\"}"), std::string("{\"num_layers\": 2, \"num_layers\": 3}"),
        std::string("\0\0\0", 3), deep, "{\"patch_size\":" + deep}) {
    WanTestRepository repository;
    repository.WriteText("transformer/config.json", text);
    const absl::Status status = ReadWanConfig(repository.root()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text.substr(0, 40) << status;
    EXPECT_THAT(status.message(), HasSubstr("transformer/config.json"));
  }
}

}  // namespace
}  // namespace dlo
