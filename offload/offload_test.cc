#include <vector>

#include "gtest/gtest.h"
#include "offload/block_layout.h"
#include "offload/resident_ring.h"

namespace dlo {
namespace {

TEST(BlockLayout, AlignsEveryTensorAndKeepsTheOrder) {
  const std::vector<TensorSpec> specs = {
      {.name = "a", .shape = {3}, .dtype = DType::kF32},
      {.name = "b", .shape = {16, 16}, .dtype = DType::kBF16},
      {.name = "empty", .shape = {0, 4}, .dtype = DType::kF32},
      {.name = "c", .shape = {1}, .dtype = DType::kBF16},
  };
  const BlockLayout layout = BlockLayout::Of(specs);
  ASSERT_EQ(layout.num_tensors(), 4);
  EXPECT_EQ(layout.tensor(0).offset, 0);
  EXPECT_EQ(layout.tensor(1).offset, 256);
  EXPECT_EQ(layout.tensor(2).offset, 768);  // 512 bytes of b lie without a gap
  EXPECT_EQ(layout.tensor(3).offset, 768);
  EXPECT_EQ(layout.total_bytes(), 1024);
}

TEST(BlockLayout, OfNothingIsEmpty) { EXPECT_EQ(BlockLayout::Of({}).total_bytes(), 0); }

TEST(ResidentRing, WalksItsBlocksInACircleAndRewinds) {
  auto device = *OpenDevice(DeviceKind::kCpu, 0);
  std::vector<ResidentRing::Block> blocks;
  for (int i = 0; i < 3; ++i) {
    BlockLayout layout = BlockLayout::Of({{.name = "w", .shape = {i + 1}, .dtype = DType::kF32}});
    DeviceBuffer buffer = *device->Allocate(layout.total_bytes());
    blocks.push_back({std::move(layout), std::move(buffer)});
  }
  ResidentRing ring(std::move(blocks));
  for (int visit = 0; visit < 7; ++visit) {
    auto lease = ring.Acquire();
    ASSERT_TRUE(lease.ok());
    EXPECT_EQ(lease->block(), visit % 3);
    EXPECT_EQ(lease->layout().tensor(0).spec.shape[0], visit % 3 + 1);
  }
  ring.Rewind();
  EXPECT_EQ(ring.Acquire()->block(), 0);
}

TEST(ResidentRing, WithoutBlocksIsAnError) {
  ResidentRing ring({});
  EXPECT_EQ(ring.Acquire().status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace dlo
