#include "models/mapped_blocks.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/test_folder.h"
#include "loader/weights.h"

namespace dlo {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Rows 3 to 5 of "qkv" before rows 0 to 2.
class SwapHalves : public CheckpointAdapter {
 public:
  std::optional<Adaptation> Adapt(const TensorSpec& spec,
                                  const SourceTensor& source) const override {
    if (!absl::EndsWith(spec.name, "qkv")) return kept_.Adapt(spec, source);
    const int64_t half = spec.bytes() / 2;
    return Adaptation{.adapter = "swap/1", .runs = {{half, 0, half}, {0, half, half}}};
  }

 private:
  const KeptFloat32Adapter kept_{DType::kBF16};
};

// Three blocks in two files: matrices in bfloat16, a table that stays float32 and is stored in
// 16 bits, a tensor without elements, and one that is loaded in the model's own way.
class MappedBlocksTest : public testing::Test {
 protected:
  MappedBlocksTest() {
    for (int b = 0; b < 3; ++b) {
      const std::string prefix = absl::StrCat("blocks.", b, ".");
      std::vector<TensorSpec> block = {
          {.name = prefix + "matrix", .shape = {33, 57}, .dtype = DType::kBF16, .block = b},
          {.name = prefix + "table", .shape = {1, 19}, .dtype = DType::kF32, .block = b},
          {.name = prefix + "none", .shape = {0, 4}, .dtype = DType::kBF16, .block = b},
          {.name = prefix + "qkv", .shape = {6, 10}, .dtype = DType::kBF16, .block = b}};
      layouts_.push_back(BlockLayout::Of(block));
      specs_.insert(specs_.end(), block.begin(), block.end());
    }
    std::vector<SafetensorsTensor> files[2];
    std::string index;
    for (size_t i = 0; i < specs_.size(); ++i) {
      std::string& bytes = stored_.emplace_back(specs_[i].num_elements() * 2, '\0');
      // Numbers between 0 and 1, so that none is NaN.
      for (size_t k = 0; k < bytes.size(); ++k) {
        bytes[k] = static_cast<char>(k % 2 == 1 ? 0x3F : (i * 17 + k * 31) & 0x7F);
      }
    }
    for (size_t i = 0; i < specs_.size(); ++i) {
      files[i % 2].push_back(
          {specs_[i].name, DType::kBF16, specs_[i].shape,
           absl::MakeConstSpan(reinterpret_cast<const std::byte*>(stored_[i].data()),
                               stored_[i].size())});
      absl::StrAppend(&index, index.empty() ? "" : ",", "\"", specs_[i].name, "\":\"", i % 2, "\"");
    }
    EXPECT_TRUE(WriteSafetensors(folder_ / "0", files[0]).ok());
    EXPECT_TRUE(WriteSafetensors(folder_ / "1", files[1]).ok());
    folder_.Write("model.safetensors.index.json", "{\"weight_map\":{" + index + "}}");
    auto checkpoint = Checkpoint::Open(folder_.path());
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    checkpoint_ = std::make_shared<const Checkpoint>(*std::move(checkpoint));
  }

  ComponentPlan Plan() const {
    ComponentNeeds needs = {.name = "x",
                            .folder = "x",
                            .streamed = true,
                            .specs = specs_,
                            .custom = {"blocks.0.qkv", "blocks.1.qkv", "blocks.2.qkv"},
                            .adapter = std::make_shared<SwapHalves>()};
    HostWeightPlan plan = PlanHostWeights({needs}, {DescribeSource("x", *checkpoint_)}, {});
    EXPECT_TRUE(plan.components[0].mapped()) << plan.components[0].reason;
    return plan.components[0];
  }
  MappedBlocks Create() {
    auto blocks = MappedBlocks::Create(checkpoint_, Plan(), layouts_);
    EXPECT_TRUE(blocks.ok()) << blocks.status();
    return *std::move(blocks);
  }
  // Block b as the ordinary loader makes it, with the halves swapped afterwards; gaps are zero.
  std::vector<std::byte> Expected(int64_t b) {
    std::vector<std::byte> block(layouts_[b].total_bytes(), std::byte{0});
    std::vector<TensorSpec> specs;
    std::vector<std::byte*> destinations;
    for (const BlockLayout::Tensor& tensor : layouts_[b].tensors()) {
      specs.push_back(tensor.spec);
      destinations.push_back(block.data() + tensor.offset);
    }
    EXPECT_TRUE(LoadTensors(*checkpoint_, specs, destinations, {.partial = true}).ok());
    const int64_t half = specs[3].bytes() / 2;
    std::swap_ranges(destinations[3], destinations[3] + half, destinations[3] + half);
    return block;
  }

  TempFolder folder_;
  std::vector<TensorSpec> specs_;
  std::vector<BlockLayout> layouts_;
  std::vector<std::string> stored_;
  std::shared_ptr<const Checkpoint> checkpoint_;
};

TEST_F(MappedBlocksTest, PackedBlocksAreThoseOfTheOrdinaryLoader) {
  const MappedBlocks created = Create();
  ASSERT_EQ(created.num_blocks(), 3);
  for (int64_t b = 0; b < 3; ++b) {
    std::vector<std::byte> packed(layouts_[b].total_bytes(), std::byte{0});
    ASSERT_TRUE(PackPieces(packed.data(), created.pieces(b)).ok());
    EXPECT_EQ(packed, Expected(b)) << "block " << b;
  }
}

TEST_F(MappedBlocksTest, PiecesLieInTheFilesAndOnlyCastTensorsInOurMemory) {
  const MappedBlocks blocks = Create();
  for (const PackPiece& piece : blocks.pieces(1)) {
    if (piece.file == nullptr) {
      EXPECT_EQ(piece.bytes, 19 * 4);
      continue;
    }
    EXPECT_GE(piece.source, piece.file->bytes().data());
    EXPECT_LE(piece.source + piece.bytes, piece.file->bytes().data() + piece.file->bytes().size());
    EXPECT_THAT(std::string(piece.tensor), HasSubstr("blocks.1."));
  }
  EXPECT_EQ(blocks.pieces(1).size(), 4u);  // matrix, table, and two halves
}

TEST_F(MappedBlocksTest, MovingKeepsThePieces) {
  MappedBlocks first = Create();
  const MappedBlocks blocks = std::move(first);
  checkpoint_.reset();  // its mapping is the blocks', too
  std::vector<std::byte> packed(layouts_[2].total_bytes());
  EXPECT_TRUE(PackPieces(packed.data(), blocks.pieces(2)).ok());
}

TEST_F(MappedBlocksTest, ShardsOfARankAreCutFromThePieces) {
  const MappedBlocks blocks = Create();
  for (int64_t ranks : {2, 3, 4}) {
    for (int64_t b = 0; b < 3; ++b) {
      const int64_t shard_bytes = layouts_[b].shard_bytes(ranks);
      std::vector<std::byte> gathered(shard_bytes * ranks, std::byte{0});
      for (int64_t r = 0; r < ranks; ++r) {
        ASSERT_TRUE(PackPieces(gathered.data() + r * shard_bytes,
                               ClipPieces(blocks.pieces(b), r * shard_bytes, (r + 1) * shard_bytes))
                        .ok());
      }
      gathered.resize(layouts_[b].total_bytes());
      EXPECT_EQ(gathered, Expected(b)) << ranks << " ranks, block " << b;
    }
  }
}

TEST_F(MappedBlocksTest, FaultsInWhatIsMapped) {
  const MappedBlocks blocks = Create();
  auto stats = blocks.FaultIn(2);
  ASSERT_TRUE(stats.ok()) << stats.status();
  EXPECT_EQ(stats->bytes, 3 * (33 * 57 + 6 * 10) * 2);
}

TEST_F(MappedBlocksTest, ACutFileIsNoticedWhenABlockIsPacked) {
  const MappedBlocks blocks = Create();
  std::vector<std::byte> packed(layouts_[2].total_bytes());
  ASSERT_TRUE(PackPieces(packed.data(), blocks.pieces(2)).ok());
  ASSERT_EQ(truncate((folder_ / "0").c_str(), 100), 0);
  const absl::Status status = PackPieces(packed.data(), blocks.pieces(2));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("blocks.2.matrix"), HasSubstr((folder_ / "0").native())));
}

TEST_F(MappedBlocksTest, APlanOfAnotherCheckpointIsAnError) {
  ComponentPlan plan = Plan();
  plan.bindings[0].bytes += 2;
  EXPECT_EQ(MappedBlocks::Create(checkpoint_, plan, layouts_).status().code(),
            absl::StatusCode::kInternal);
  plan = Plan();
  plan.bindings.pop_back();
  EXPECT_THAT(std::string(MappedBlocks::Create(checkpoint_, plan, layouts_).status().message()),
              HasSubstr("blocks.2.qkv"));
}

}  // namespace
}  // namespace dlo
