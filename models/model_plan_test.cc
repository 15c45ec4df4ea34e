#include "models/model_plan.h"

#include <gtest/gtest.h>

#include <memory>

#include "models/wan/wan_test_repository.h"

namespace dlo {
namespace {

std::unique_ptr<ModelCard> Card(WanTestRepository& repository) {
  repository.AllowFullSize();
  absl::StatusOr<std::unique_ptr<ModelCard>> card = ReadModelCard(repository.root());
  EXPECT_TRUE(card.ok()) << card.status();
  return *std::move(card);
}

RequestToPlan Request(const ModelCard& card, const RequestedSettings& requested) {
  RequestToPlan request{.prompt = std::string(39, 'x'), .negative_prompt = ""};
  const auto wrong = card.Resolve(requested, 0, &request.settings);
  for (const FieldViolation& violation : wrong) ADD_FAILURE() << violation.description;
  return request;
}

RequestWork Work(const ModelCard& card, const RequestedSettings& requested,
                 DType dtype = DType::kF32) {
  absl::StatusOr<RequestWork> work = WorkOf(card, dtype, Request(card, requested));
  EXPECT_TRUE(work.ok()) << work.status();
  return *std::move(work);
}

constexpr auto Settings = [](int64_t size, int64_t frames, int64_t steps, double guidance) {
  RequestedSettings settings;
  settings.width = settings.height = size;
  settings.num_frames = frames;
  settings.num_inference_steps = steps;
  settings.guidance_scale = guidance;
  return settings;
};

TEST(ModelPlanTest, OperationsAreThoseOfTheLayers) {
  WanTestRepository repository;
  const RequestWork work = Work(*Card(repository), Settings(32, 5, 3, 1));
  // 10 tokens of text in 2 layers: 32 wide, 4 heads of 8, feed-forward 37.
  EXPECT_EQ(work.text_flops,
            2 * (4 * 2. * 10 * 32 * 32 + 2 * 2. * 10 * 32 * 10 + 3 * 2. * 10 * 32 * 37));
  // 2 latent frames of 4x4 make 8 tokens; 2 layers 24 wide, feed-forward 32; 16 channels in patches
  // of 4.
  const double layer = 4 * 2. * 8 * 24 * 24 + 2 * 2. * 8 * 24 * 8 +   // self attention
                       2 * 2. * 8 * 24 * 24 + 2 * 2. * 8 * 24 * 11 +  // cross attention
                       2 * 2. * 8 * 24 * 32;                          // feed-forward
  EXPECT_EQ(work.denoise_flops, 3 * (2 * layer + 2 * 2. * 8 * 64 * 24));
}

TEST(ModelPlanTest, GuidanceDoublesTheOperationsAndNotTheBytes) {
  WanTestRepository repository;
  const std::unique_ptr<ModelCard> card = Card(repository);
  const RequestWork alone = Work(*card, Settings(32, 5, 3, 1));
  const RequestWork guided = Work(*card, Settings(32, 5, 3, 5));
  // The negative prompt is shorter.
  EXPECT_GT(guided.denoise_flops, 1.9 * alone.denoise_flops);
  EXPECT_LT(guided.denoise_flops, 2 * alone.denoise_flops);
  EXPECT_GT(guided.text_flops, alone.text_flops);
  EXPECT_EQ(guided.decode_flops, alone.decode_flops);
  EXPECT_EQ(guided.rings[1].block.total_bytes(), alone.rings[1].block.total_bytes());
  EXPECT_EQ(guided.plan.digest(), "2,2:0x2,1x3");
}

TEST(ModelPlanTest, DecodingGrowsWithPixelsAndFrames) {
  WanTestRepository repository;
  const std::unique_ptr<ModelCard> card = Card(repository);
  const double small = Work(*card, Settings(32, 5, 1, 1)).decode_flops;
  EXPECT_GT(small, 0);
  const double large = Work(*card, Settings(64, 5, 1, 1)).decode_flops;
  // Attention in the middle grows faster than the pixels.
  EXPECT_GT(large, 4 * small);
  EXPECT_LT(large, 4.5 * small);
  const double longer = Work(*card, Settings(32, 9, 1, 1)).decode_flops;
  EXPECT_GT(longer, 1.5 * small);
  EXPECT_LT(longer, 2 * small);
}

TEST(ModelPlanTest, EveryExpertIsARingOfItsOwn) {
  WanTestRepository repository;
  repository.MakeTwoExperts(0.875);
  const RequestWork work = Work(*Card(repository), Settings(32, 5, 10, 1));
  ASSERT_EQ(work.rings.size(), 3u);
  EXPECT_EQ(work.rings[2].component, "transformer_2");
  EXPECT_EQ(work.rings[2].block.total_bytes(), work.rings[1].block.total_bytes());
  EXPECT_EQ(work.plan.ring_sizes(), (std::vector<int64_t>{2, 2, 3}));
  EXPECT_EQ(work.plan.runs().size(), 3u);
}

TEST(ModelPlanTest, ResidentBlocksAreComputedAndNotVisited) {
  WanTestRepository repository;
  const std::unique_ptr<ModelCard> card = Card(repository);
  RequestToPlan request = Request(*card, Settings(32, 5, 3, 1));
  const RequestWork none = *WorkOf(*card, DType::kF32, request);
  request.resident_blocks = 1;
  EXPECT_EQ(WorkOf(*card, DType::kF32, request)->plan.digest(), "2,1:0x1,1x3");
  request.resident_blocks = 2;
  const RequestWork all = *WorkOf(*card, DType::kF32, request);
  EXPECT_EQ(all.plan.digest(), "2,0:0x1");
  EXPECT_EQ(all.denoise_flops, none.denoise_flops);
}

TEST(ModelPlanTest, BytesAreThoseOfTheDtype) {
  WanTestRepository repository;
  const std::unique_ptr<ModelCard> card = Card(repository);
  const RequestWork half = Work(*card, Settings(32, 5, 1, 1), DType::kBF16);
  const RequestWork full = Work(*card, Settings(32, 5, 1, 1), DType::kF32);
  EXPECT_LT(half.rings[0].block.total_bytes(), full.rings[0].block.total_bytes());
  EXPECT_GE(half.rings[0].block.total_bytes() * 2, full.rings[0].block.total_bytes());
  EXPECT_EQ(half.rings[0].block.total_bytes() % 256, 0);
}

}  // namespace
}  // namespace dlo
