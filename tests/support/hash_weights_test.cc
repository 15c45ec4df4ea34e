#include "tests/support/hash_weights.h"

#include "gtest/gtest.h"

namespace dlo {
namespace {

TEST(HashWeights, MatchesThePublishedCheckValues) {
  const uint32_t crc = HashCrc32("input.hidden_states");
  EXPECT_EQ(crc, 0x85770174u);
  const double want[] = {0.417674463, 0.713260178, -0.534835376, 0.17828294};
  for (uint32_t i = 0; i < 4; ++i) EXPECT_NEAR(HashUniform(crc, i), want[i], 1e-9) << i;
}

TEST(HashWeights, TheComponentChangesTheValuesButNotTheRange) {
  const std::vector<int64_t> shape = {4, 9};
  const auto bare = HashWeight("a.weight", shape);
  EXPECT_EQ(bare, HashWeight("a.weight", shape, ""));
  EXPECT_NE(bare, HashWeight("a.weight", shape, "vae"));
  for (float v : HashWeight("a.weight", shape, "vae")) EXPECT_LE(std::abs(v), 1.0f / 3);
}

TEST(HashWeights, RangesFollowTheName) {
  const std::vector<int64_t> vector = {8};
  EXPECT_EQ(HashWeightRange("blocks.0.scale_shift_table", {1, 6, 8}).scale, 0.2);
  EXPECT_EQ(HashWeightRange("x.bias", vector).offset, 0);
  EXPECT_EQ(HashWeightRange("x.gamma", vector).offset, 1);
  EXPECT_EQ(HashWeightRange("norm.weight", vector).offset, 1);
  EXPECT_EQ(HashWeightRange("shared.weight", {64, 32}).scale, 1);
  EXPECT_EQ(HashWeightRange("conv.weight", {7, 4, 1, 2, 2}).scale, 0.25);
}

}  // namespace
}  // namespace dlo
