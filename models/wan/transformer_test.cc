#include "models/wan/transformer.h"

#include <ATen/ATen.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "models/wan/transformer_specs.h"
#include "tests/support/hash_checkpoint.h"
#include "tests/support/tensor_testing.h"

namespace dlo {
namespace {

constexpr WanTransformerConfig kTiny = {.num_attention_heads = 2,
                                        .attention_head_dim = 12,
                                        .in_channels = 4,
                                        .out_channels = 4,
                                        .text_dim = 16,
                                        .ffn_dim = 32,
                                        .num_layers = 2,
                                        .rope_max_seq_len = 32};

class WanTransformerTest : public testing::Test {
 protected:
  WanTransformer HashTransformer(const WanTransformerConfig& config, DType dtype) {
    EXPECT_TRUE(WriteHashCheckpoint(scratch_.path(), WanTransformerSpecs(config, dtype)).ok());
    return Load(config, scratch_.path(), dtype);
  }
  WanTransformer Load(const WanTransformerConfig& config, const std::filesystem::path& dir,
                      DType dtype, OnlineQuantization quantization = OnlineQuantization::kNone) {
    auto checkpoint = Checkpoint::Open(dir);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    auto weights = ComponentWeights::Load(
        *checkpoint, WanTransformerSpecs(config, dtype, quantization), *device_);
    EXPECT_TRUE(weights.ok()) << weights.status();
    return WanTransformer(config, *std::move(weights));
  }
  at::Tensor Run(WanTransformer& transformer, const at::Tensor& x, const at::Tensor& text,
                 at::Tensor timestep) {
    WanContext context = transformer.Prepare({x.size(2), x.size(3), x.size(4)}, {{text[0], 0}});
    auto velocity = transformer.Forward(x.to(transformer.dtype()), timestep, context);
    EXPECT_TRUE(velocity.ok()) << velocity.status();
    return *velocity;
  }

  std::unique_ptr<Device> device_ = *OpenDevice(DeviceKind::kCpu, 0);
  ScratchDir scratch_;
};

at::Tensor Time(float t) { return at::full({1}, t); }

TEST(WanTransformerSpecs, FullSizesHaveThePublishedCounts) {
  struct Row {
    int64_t heads, ffn, layers, channels;
    size_t tensors;
    int64_t parameters;
  };
  for (const Row& row :
       {Row{12, 8960, 30, 16, 825, 1'418'996'800}, Row{40, 13824, 40, 16, 1095, 14'288'491'584},
        Row{24, 14336, 30, 48, 825, 4'999'787'712}}) {
    WanTransformerConfig config;
    config.num_attention_heads = row.heads;
    config.ffn_dim = row.ffn;
    config.num_layers = row.layers;
    config.in_channels = config.out_channels = row.channels;
    const auto specs = WanTransformerSpecs(config, DType::kBF16);
    int64_t parameters = 0;
    for (const TensorSpec& spec : specs) parameters += spec.num_elements();
    EXPECT_EQ(specs.size(), row.tensors);
    EXPECT_EQ(parameters, row.parameters);
  }
}

constexpr OnlineQuantization kFp8 = OnlineQuantization::kPerTensorFp8;

TEST(WanTransformerSpecs, Fp8BlocksAreHalfAsLargeAndTheRestIsAsBefore) {
  const WanTransformerConfig config;  // 14B
  const auto plain = WanTransformerSpecs(config, DType::kBF16);
  const auto fp8 = WanTransformerSpecs(config, DType::kBF16, kFp8);
  EXPECT_EQ(fp8.size(), plain.size() + 8 * config.num_layers);
  const auto block_bytes = [](const std::vector<TensorSpec>& specs) {
    int64_t bytes = 0;
    for (const TensorSpec& spec : specs) bytes += spec.block == 3 ? spec.bytes() : 0;
    return bytes;
  };
  // As ../shared/reference/models.md, section 12, gives them.
  EXPECT_NEAR(static_cast<double>(block_bytes(plain)), 702.8e6, 0.1e6);
  EXPECT_NEAR(static_cast<double>(block_bytes(fp8)), 351.4e6, 0.2e6);
  std::map<std::string, int> users;  // of each scale
  size_t next = 0;
  for (const TensorSpec& spec : fp8) {
    if (spec.name.ends_with("weight_scale")) {
      EXPECT_EQ(spec.dtype, DType::kF32);
      EXPECT_EQ(spec.shape, std::vector<int64_t>{1});
      EXPECT_EQ(users[spec.name], spec.name.ends_with("attn1.to_qkv.weight_scale") ? 3 : 1)
          << spec.name;  // which stand before it
      continue;
    }
    const TensorSpec& was = plain[next++];
    EXPECT_EQ(spec.name, was.name);
    EXPECT_EQ(spec.shape, was.shape);
    EXPECT_EQ(spec.block, was.block);
    if (spec.scale.empty()) {
      EXPECT_EQ(spec.dtype, was.dtype) << spec.name;
      EXPECT_FALSE(spec.block >= 0 && spec.shape.size() == 2) << spec.name;
    } else {
      EXPECT_EQ(spec.dtype, DType::kF8E4M3) << spec.name;
      EXPECT_TRUE(spec.block >= 0 && spec.shape.size() == 2) << spec.name;
      ++users[spec.scale];
    }
  }
  EXPECT_EQ(users.size(), 8u * config.num_layers);
}

TEST(WanTransformerTpSpecs, TheRanksTogetherHoldEachTensorOnceOrWhole) {
  WanTransformerConfig config = kTiny;
  config.num_attention_heads = 4;
  // Dimension that is cut, of a block's tensors; those left out are whole.
  std::map<std::string, int> cut;
  for (const char* attention : {"attn1", "attn2"}) {
    for (const char* part : {"to_q", "to_k", "to_v"}) {
      cut[absl::StrCat(attention, ".", part, ".weight")] = 0;
      cut[absl::StrCat(attention, ".", part, ".bias")] = 0;
    }
    cut[absl::StrCat(attention, ".norm_q.weight")] = 0;
    cut[absl::StrCat(attention, ".norm_k.weight")] = 0;
    cut[absl::StrCat(attention, ".to_out.0.weight")] = 1;
  }
  cut["ffn.net.0.proj.weight"] = cut["ffn.net.0.proj.bias"] = 0;
  cut["ffn.net.2.weight"] = 1;
  for (OnlineQuantization quantization : {OnlineQuantization::kNone, kFp8}) {
    const auto whole = WanTransformerSpecs(config, DType::kBF16, quantization);
    for (int tp : {1, 2, 4}) {
      size_t num_cut = 0;
      std::vector<int64_t> next(whole.size());
      for (int rank = 0; rank < tp; ++rank) {
        const auto specs = WanTransformerTpSpecs(config, DType::kBF16, rank, tp, quantization);
        ASSERT_TRUE(specs.ok()) << specs.status();
        ASSERT_EQ(specs->size(), whole.size());
        for (size_t i = 0; i < whole.size(); ++i) {
          const TensorSpec& spec = (*specs)[i];
          ASSERT_EQ(spec.name, whole[i].name);
          EXPECT_EQ(spec.dtype, whole[i].dtype);
          EXPECT_EQ(spec.scale, whole[i].scale);
          const size_t prefix = spec.name.starts_with("blocks.") ? spec.name.find('.', 7) + 1 : 0;
          const auto expected = cut.find(spec.name.substr(prefix));
          if (tp == 1 || prefix == 0 || expected == cut.end()) {
            EXPECT_FALSE(spec.slice.has_value()) << spec.name;
            EXPECT_EQ(spec.shape, whole[i].shape);
            continue;
          }
          ++num_cut;
          ASSERT_TRUE(spec.slice.has_value()) << spec.name;
          const int dim = spec.slice->dim;
          EXPECT_EQ(dim, expected->second) << spec.name;
          EXPECT_EQ(spec.slice->begin, next[i]);
          next[i] += spec.shape[dim];
          std::vector<int64_t> full = spec.shape;
          full[dim] = spec.slice->full;
          EXPECT_EQ(full, whole[i].shape) << spec.name;
          EXPECT_TRUE(rank < tp - 1 || next[i] == spec.slice->full) << spec.name;
        }
      }
      EXPECT_EQ(num_cut, tp == 1 ? 0 : cut.size() * config.num_layers * tp);
    }
  }
  for (const auto& [rank, tp] :
       {std::pair(0, 3), std::pair(0, 8), std::pair(2, 2), std::pair(-1, 2), std::pair(0, 0)}) {
    EXPECT_EQ(WanTransformerTpSpecs(config, DType::kBF16, rank, tp).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

// What a tensor-parallel engine computes, in one place: each rank's part of the feed-forward layer
// with its slices, summed, is the layer.
TEST_F(WanTransformerTest, SlicesOfTheFeedForwardLayerAddUp) {
  ASSERT_TRUE(WriteHashCheckpoint(scratch_.path(), WanTransformerSpecs(kTiny, DType::kF32)).ok());
  auto checkpoint = Checkpoint::Open(scratch_.path());
  ASSERT_TRUE(checkpoint.ok());
  const at::Tensor x = HashTensor("input.x", {1, 5, kTiny.hidden_size()});
  const auto compute = [&](int rank, int tp) {
    std::map<std::string, at::Tensor> tensors;
    std::vector<TensorSpec> specs;
    std::vector<std::byte*> destinations;
    const auto all = WanTransformerTpSpecs(kTiny, DType::kF32, rank, tp);
    EXPECT_TRUE(all.ok());
    for (const TensorSpec& spec : *all) {
      if (!spec.name.starts_with("blocks.1.ffn.net.")) continue;
      const at::Tensor tensor = at::empty(spec.shape, at::kFloat);
      destinations.push_back(static_cast<std::byte*>(tensor.mutable_data_ptr()));
      tensors[spec.name.substr(17)] = tensor;
      specs.push_back(spec);
    }
    EXPECT_TRUE(LoadTensors(*checkpoint, specs, destinations, {.partial = true}).ok());
    const at::Tensor up =
        at::gelu(at::linear(x, tensors.at("0.proj.weight"), tensors.at("0.proj.bias")), "tanh");
    at::Tensor down = at::linear(up, tensors.at("2.weight"));
    return rank == 0 ? down + tensors.at("2.bias") : down;
  };
  EXPECT_LT(MaxAbsError(compute(0, 2) + compute(1, 2), compute(0, 1)), 2e-6);
}

// The quantised tensors of the checkpoint brought back, in float32, by torch.
std::map<std::string, at::Tensor> BroughtBack(const Checkpoint& checkpoint,
                                              const WanTransformerConfig& config, DType dtype) {
  const auto specs = WanTransformerSpecs(config, dtype, kFp8);
  std::map<std::string, at::Tensor> tensors;
  std::vector<std::byte*> destinations;
  for (const TensorSpec& spec : specs) {
    const at::Tensor tensor = at::empty(spec.shape, TorchDType(spec.dtype));
    destinations.push_back(static_cast<std::byte*>(tensor.mutable_data_ptr()));
    tensors[spec.name] = tensor;
  }
  EXPECT_TRUE(LoadTensors(checkpoint, specs, destinations).ok());
  std::map<std::string, at::Tensor> result;
  for (const TensorSpec& spec : specs) {
    if (spec.scale.empty()) continue;
    result[spec.name] =
        (tensors.at(spec.name).to(at::kFloat) * tensors.at(spec.scale)).to(TorchDType(dtype));
  }
  return result;
}

TEST_F(WanTransformerTest, Fp8IsExactlyTheForwardOfTheWeightsBroughtBack) {
  const at::Tensor x = HashTensor("input.hidden_states", {1, 4, 2, 16, 16});
  const at::Tensor text = HashTensor("input.encoder_hidden_states", {1, 12, 16});
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    WanTransformer plain = HashTransformer(kTiny, dtype);
    WanTransformer fp8 = Load(kTiny, scratch_.path(), dtype, kFp8);
    const at::Tensor velocity = Run(fp8, x, text, Time(500));

    auto checkpoint = Checkpoint::Open(scratch_.path());
    ASSERT_TRUE(checkpoint.ok());
    const std::map<std::string, at::Tensor> by_hand = BroughtBack(*checkpoint, kTiny, dtype);
    EXPECT_EQ(by_hand.size(), 10u * kTiny.num_layers);
    ScratchDir other;
    std::vector<SafetensorsTensor> tensors;
    std::vector<at::Tensor> keep;
    for (const TensorSpec& spec : WanTransformerSpecs(kTiny, DType::kF32)) {
      const auto found = by_hand.find(spec.name);
      const TensorSource source = *checkpoint->Find(spec.name);
      absl::Span<const std::byte> data = source.data;
      if (found != by_hand.end()) {
        keep.push_back(found->second.to(at::kFloat).contiguous());
        data = {static_cast<const std::byte*>(keep.back().const_data_ptr()), data.size()};
      }
      tensors.push_back({spec.name, DType::kF32, spec.shape, data});
    }
    ASSERT_TRUE(
        WriteSafetensors(other.path() / "diffusion_pytorch_model.safetensors", tensors).ok());
    WanTransformer dequantised = Load(kTiny, other.path(), dtype);
    EXPECT_TRUE(at::equal(velocity, Run(dequantised, x, text, Time(500)))) << DTypeName(dtype);

    // Three bits of mantissa are off by at most 1/16 and by 2.6% on average; of a sum of many such
    // terms, and of the residual stream that is not quantised, less remains.
    const double error = RelativeError(velocity, Run(plain, x, text, Time(500)));
    EXPECT_LT(error, 4e-2) << DTypeName(dtype);
    EXPECT_GT(error, 1e-3) << "nothing was quantised";
  }
}

TEST_F(WanTransformerTest, HashWeightsInFloat32) {
  WanTransformer transformer = HashTransformer(kTiny, DType::kF32);
  const at::Tensor x = HashTensor("input.hidden_states", {1, 4, 2, 16, 16});
  const at::Tensor text = HashTensor("input.encoder_hidden_states", {1, 12, 16});
  ExpectSummary(
      Run(transformer, x, text, Time(500)),
      {25.482360,
       28.211680,
       {0.552356f, 0.241181f, 1.323798f, 0.390276f, 0.108714f, -1.080618f, -0.472778f, 0.364193f}},
      1e-5);
  ExpectSummary(
      Run(transformer, x, text, Time(999)),
      {30.541775,
       26.996506,
       {0.546552f, 0.337013f, 1.235693f, 0.490480f, -0.012835f, -1.031791f, -0.663261f, 0.348880f}},
      1e-5);
  const at::Tensor per_token = at::cat({at::zeros({64}), at::full({64}, 500.0f)});
  ExpectSummary(
      Run(transformer, x, text, per_token),
      {37.900713,
       28.231509,
       {0.640188f, 0.371910f, 1.426652f, 0.552958f, 0.171157f, -1.062438f, -0.469126f, 0.366298f}},
      1e-5);
}

// The reference itself states 1e-2: two blocks of bfloat16 roundings on values around 1.
TEST_F(WanTransformerTest, HashWeightsInBFloat16) {
  WanTransformer transformer = HashTransformer(kTiny, DType::kBF16);
  ExpectSummary(
      Run(transformer, HashTensor("input.hidden_states", {1, 4, 2, 16, 16}),
          HashTensor("input.encoder_hidden_states", {1, 12, 16}), Time(500)),
      {26.068640,
       28.222192,
       {0.550781f, 0.244141f, 1.328125f, 0.390625f, 0.108887f, -1.085938f, -0.476562f, 0.367188f}},
      1e-2);
}

TEST_F(WanTransformerTest, FourLayersFourHeads) {
  WanTransformerConfig config = kTiny;
  config.num_attention_heads = 4;
  config.attention_head_dim = 16;
  config.ffn_dim = 64;
  config.num_layers = 4;
  config.in_channels = config.out_channels = 16;
  config.text_dim = 32;
  WanTransformer transformer = HashTransformer(config, DType::kF32);
  ExpectSummary(Run(transformer, HashTensor("input.hidden_states", {1, 16, 3, 8, 12}),
                    HashTensor("input.encoder_hidden_states", {1, 8, 32}), Time(700)),
                {232.451170,
                 40.287331,
                 {0.230680f, -0.402793f, -0.341984f, -0.109912f, -0.778858f, 0.459025f, -0.618044f,
                  0.553691f}},
                1e-5);
}

TEST(WanRotary, AnglesOfTheGrid) {
  const Rotary rotary = WanRotary({2, 8, 8}, 12);
  EXPECT_EQ(rotary.cos.sizes(), at::IntArrayRef({128, 6}));
  // diffusers repeats each value for both members of a pair.
  EXPECT_NEAR(rotary.cos.sum().item<double>() * 2, 1059.312677, 1e-3);
  EXPECT_NEAR(rotary.sin.sum().item<double>() * 2, 162.338791, 1e-3);
}

// Guidance branches share a pass through the blocks; each must get what it would get alone.
TEST_F(WanTransformerTest, BranchesTogetherEqualBranchesAlone) {
  WanTransformer transformer = HashTransformer(kTiny, DType::kF32);
  const at::Tensor x = HashTensor("input.hidden_states", {1, 4, 2, 16, 16});
  const std::vector<TextEmbedding> texts = {{HashTensor("text.a", {5, 16}), 507},
                                            {HashTensor("text.b", {1, 16}), 511}};
  WanContext both = transformer.Prepare({2, 16, 16}, texts);
  for (float t : {999.0f, 500.0f}) {  // the second step uses the kept keys and values
    const at::Tensor together = *transformer.Forward(x, Time(t), both);
    ASSERT_EQ(together.size(0), 2);
    for (int g = 0; g < 2; ++g) {
      WanContext alone = transformer.Prepare({2, 16, 16}, {texts[g]});
      EXPECT_LT(MaxAbsError(together.narrow(0, g, 1), *transformer.Forward(x, Time(t), alone)),
                2e-6);
    }
  }
}

// The 512 rows that diffusers feeds, most of them zero, against the few rows we compute with.
TEST_F(WanTransformerTest, PaddingRowsWeighAsManyKeys) {
  WanTransformer transformer = HashTransformer(kTiny, DType::kF32);
  const at::Tensor x = HashTensor("input.hidden_states", {1, 4, 2, 16, 16});
  const at::Tensor rows = HashTensor("text.a", {5, 16});
  const at::Tensor padded = at::cat({rows, at::zeros({507, 16})}).unsqueeze(0);
  WanContext context = transformer.Prepare({2, 16, 16}, {{rows, 507}});
  EXPECT_LT(MaxAbsError(*transformer.Forward(x, Time(500), context),
                        Run(transformer, x, padded, Time(500))),
            5e-6);
}

// Goldens of diffusers: scalar times on a Wan 2.1 repository, times per token on a TI2V one.
TEST_F(WanTransformerTest, EqualsDiffusers) {
  const std::filesystem::path goldens = std::filesystem::path(DLO_SOURCE_DIR) / "tests/goldens";
  for (const auto& [name, repo] :
       {std::pair{"transformer", "wan21"}, std::pair{"transformer_per_token", "wan22-ti2v"}}) {
    auto file =
        SafetensorsFile::Open(goldens / "components" / (std::string(name) + ".safetensors"));
    ASSERT_TRUE(file.ok()) << file.status();
    auto config = ReadWanConfig(goldens / "pipelines" / repo / "repo");
    ASSERT_TRUE(config.ok()) << config.status();
    const at::Tensor x = GoldenTensor(*file, "x"), text = GoldenTensor(*file, "text");
    int cases = 0;
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      WanTransformer transformer =
          Load(config->transformer, goldens / "pipelines" / repo / "repo/transformer", dtype);
      for (const auto& [key, entry] : file->tensors()) {
        if (!key.starts_with("t.")) continue;
        const bool f32 = dtype == DType::kF32;
        const at::Tensor expected = GoldenTensor(*file, (f32 ? "fp32." : "bf16.") + key.substr(2));
        const at::Tensor t = GoldenTensor(*file, key).to(at::kFloat).flatten();
        // bfloat16: a few roundings (2^-8 each) of the largest value.
        EXPECT_LT(RelativeError(Run(transformer, x, text, t), expected), f32 ? 1e-5 : 1.5e-2)
            << name << " " << key;
        ++cases;
      }
    }
    EXPECT_GE(cases, 4);
  }
}

// An error or a cancellation can leave a forward at any block; the next one must start at block 0.
TEST_F(WanTransformerTest, AForwardAfterAnAbandonedOneIsWhole) {
  WanTransformer transformer = HashTransformer(kTiny, DType::kF32);
  const at::Tensor x = HashTensor("input.hidden_states", {1, 4, 2, 16, 16});
  const at::Tensor text = HashTensor("input.encoder_hidden_states", {1, 12, 16});
  const at::Tensor expected = Run(transformer, x, text, Time(500));
  WanContext broken = transformer.Prepare({2, 16, 16}, {{text[0], 0}});
  broken.rotary.cos = at::zeros({3, 6});  // block 0 throws
  EXPECT_THROW((void)transformer.Forward(x, Time(500), broken), c10::Error);
  EXPECT_EQ(MaxAbsError(Run(transformer, x, text, Time(500)), expected), 0);
}

}  // namespace
}  // namespace dlo
