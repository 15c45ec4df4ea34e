#include "models/umt5/umt5.h"

#include <ATen/ATen.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "models/umt5/umt5_specs.h"
#include "tests/support/hash_checkpoint.h"
#include "tests/support/tensor_testing.h"

namespace dlo {
namespace {

constexpr Umt5Config kTiny = {
    .vocab_size = 64, .d_model = 32, .d_kv = 8, .d_ff = 48, .num_layers = 2, .num_heads = 4};

class Umt5Test : public testing::Test {
 protected:
  Umt5Encoder HashEncoder(DType dtype) {
    const auto specs = Umt5Specs(kTiny, dtype);
    EXPECT_TRUE(WriteHashCheckpoint(scratch_.path(), specs).ok());
    return Load(kTiny, scratch_.path(), dtype);
  }
  Umt5Encoder Load(const Umt5Config& config, const std::filesystem::path& dir, DType dtype) {
    auto opened = Checkpoint::Open(dir);
    EXPECT_TRUE(opened.ok()) << opened.status();
    const auto checkpoint = std::make_shared<const Checkpoint>(*std::move(opened));
    auto weights = ComponentWeights::Load(*checkpoint, Umt5DeviceSpecs(config, dtype), *device_,
                                          {.partial = true});
    EXPECT_TRUE(weights.ok()) << weights.status();
    auto tokens = HostTable::Create(checkpoint, Umt5TokenTable(config, dtype));
    EXPECT_TRUE(tokens.ok()) << tokens.status();
    return Umt5Encoder(config, *std::move(weights), *std::move(tokens));
  }

  std::unique_ptr<Device> device_ = *OpenDevice(DeviceKind::kCpu, 0);
  ScratchDir scratch_;
};

const std::vector<int64_t> kNineIds = {5, 17, 33, 2, 60, 61, 9, 40, 1};

TEST(Umt5Specs, FullSizeHasThePublishedCounts) {
  int64_t parameters = 0;
  const auto specs = Umt5Specs(Umt5Config(), DType::kBF16);
  for (const TensorSpec& spec : specs) parameters += spec.num_elements();
  EXPECT_EQ(specs.size(), 242u);
  EXPECT_EQ(parameters, 5'680'910'336);
}

TEST(RelativePositionBuckets, MatchTheReference) {
  const at::Tensor buckets = RelativePositionBuckets(201, 32, 128);
  const std::vector<std::pair<int, int>> expected = {
      {-200, 15}, {-128, 15}, {-64, 14}, {-40, 12}, {-20, 10}, {-16, 10}, {-12, 9}, {-9, 8},
      {-8, 8},    {-7, 7},    {-1, 1},   {0, 0},    {1, 17},   {7, 23},   {8, 24},  {9, 24},
      {12, 25},   {16, 26},   {20, 26},  {40, 28},  {64, 30},  {100, 31}, {127, 31}};
  for (const auto& [relative, bucket] : expected) {
    const int query = relative < 0 ? 200 : 0;
    EXPECT_EQ(buckets[query][query + relative].item<int64_t>(), bucket) << relative;
  }
}

TEST_F(Umt5Test, NineTokensInFloat32) {
  ExpectSummary(
      *HashEncoder(DType::kF32).Encode(kNineIds),
      {-1.046608,
       17.165251,
       {0.189504f, 0.390968f, 0.156791f, 0.522316f, 0.268072f, 1.528761f, -0.337359f, 1.788044f}},
      1e-5);
}

TEST_F(Umt5Test, ManyTokensReachTheFarBuckets) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < 160; ++i) ids.push_back(7 * i % 63 + 1);
  ExpectSummary(*HashEncoder(DType::kF32).Encode(ids),
                {121.836929,
                 72.454027,
                 {1.889266f, -1.121926f, -1.020721f, -0.982570f, 0.489980f, 1.828133f, -0.812360f,
                  -0.308788f}},
                1e-5);
}

// One bfloat16 rounding of values near 2 is 0.008; they add up over two blocks.
TEST_F(Umt5Test, NineTokensInBFloat16) {
  ExpectSummary(
      *HashEncoder(DType::kBF16).Encode(kNineIds),
      {-0.842926,
       17.169172,
       {0.188477f, 0.392578f, 0.160156f, 0.519531f, 0.275391f, 1.539062f, -0.339844f, 1.796875f}},
      2e-2);
}

TEST_F(Umt5Test, EqualsTransformersOnPaddedPrompts) {
  const std::filesystem::path goldens = std::filesystem::path(DLO_SOURCE_DIR) / "tests/goldens";
  auto file = SafetensorsFile::Open(goldens / "components/text_encoder.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  auto config = ReadWanConfig(goldens / "pipelines/wan21/repo");
  ASSERT_TRUE(config.ok()) << config.status();
  int cases = 0;
  for (const auto& [name, entry] : file->tensors()) {
    if (!name.starts_with("ids.")) continue;
    const std::string text = name.substr(4);
    const at::Tensor ids = GoldenTensor(*file, name);
    const std::vector<int64_t> tokens(ids.const_data_ptr<int64_t>(),
                                      ids.const_data_ptr<int64_t>() + ids.numel());
    const auto dir = goldens / "pipelines/wan21/repo/text_encoder";
    EXPECT_LT(RelativeError(*Load(config->text_encoder, dir, DType::kF32).Encode(tokens),
                            GoldenTensor(*file, text + ".fp32")),
              1e-5)
        << text;
    // A few bfloat16 roundings (2^-8 each) of the largest value.
    EXPECT_LT(RelativeError(*Load(config->text_encoder, dir, DType::kBF16).Encode(tokens),
                            GoldenTensor(*file, text + ".bf16")),
              1.5e-2)
        << text;
    ++cases;
  }
  EXPECT_GE(cases, 2);
}

TEST_F(Umt5Test, AnIdOutsideTheVocabularyIsAnError) {
  auto result = HashEncoder(DType::kF32).Encode({5, 64, 1});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(result.status().message(), testing::HasSubstr("64"));
}

}  // namespace
}  // namespace dlo
