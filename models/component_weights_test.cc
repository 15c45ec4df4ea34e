// Weights in the pages of a file against the same weights in private memory.
#include "models/component_weights.h"

#include <ATen/ATen.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/test_folder.h"
#include "tests/support/hash_checkpoint.h"

namespace dlo {
namespace {

using Kind = WeightPlacement::Kind;
using testing::HasSubstr;

// Two tensors outside three blocks of two, with gaps between them.
std::vector<TensorSpec> Specs() {
  std::vector<TensorSpec> specs = {{.name = "in.weight", .shape = {7, 9}, .dtype = DType::kBF16},
                                   {.name = "out.bias", .shape = {5}, .dtype = DType::kF32}};
  for (int b = 0; b < 3; ++b) {
    const std::string prefix = "blocks." + std::to_string(b) + ".";
    specs.push_back(
        {.name = prefix + "weight", .shape = {33, 57}, .dtype = DType::kBF16, .block = b});
    specs.push_back({.name = prefix + "table", .shape = {1, 19}, .dtype = DType::kF32, .block = b});
  }
  return specs;
}

class MappedParts : public testing::Test {
 protected:
  MappedParts() {
    EXPECT_TRUE(WriteHashCheckpoint(folder_ / "x", specs_, "x").ok());
    checkpoint_ = std::make_unique<Checkpoint>(*Checkpoint::Open(folder_ / "x"));
    loaded_ = std::make_unique<ComponentWeights>(Load(Kind::kStreamed));
    // Each part as CopyPart gives it, at multiples of 4096.
    std::string bytes;
    for (int64_t i = 0; i < loaded_->num_parts(); ++i) {
      offsets_.push_back(static_cast<int64_t>((bytes.size() + 4095) / 4096 * 4096));
      bytes.resize(offsets_[i] + loaded_->part_layout(i).total_bytes(), '\x5A');
      EXPECT_TRUE(loaded_->CopyPart(i, PartOf(bytes, i)).ok());
    }
    file_ = *MappedFile::Open(folder_.Write("x.bin", bytes));
  }

  absl::Span<std::byte> PartOf(std::string& bytes, int64_t part) {
    return absl::MakeSpan(reinterpret_cast<std::byte*>(bytes.data()) + offsets_[part],
                          loaded_->part_layout(part).total_bytes());
  }
  ComponentWeights Load(Kind kind) {
    auto weights = ComponentWeights::Load(*checkpoint_, specs_, *device_, {}, {.kind = kind});
    EXPECT_TRUE(weights.ok()) << weights.status();
    return *std::move(weights);
  }
  absl::StatusOr<ComponentWeights> Map(Kind kind, int64_t resident_blocks = 0) {
    return ComponentWeights::Map({&file_, offsets_}, specs_, *device_, /*threads=*/1,
                                 {.kind = kind, .resident_blocks = resident_blocks});
  }
  std::filesystem::path path() const { return folder_ / "x.bin"; }

  // What the device has of a component that is brought in: tensors outside the ring, then blocks.
  std::vector<at::Tensor> Tensors(ComponentWeights& weights) {
    std::vector<at::Tensor> tensors = {weights.tensor("in.weight").clone(),
                                       weights.tensor("out.bias").clone()};
    for (int64_t b = 0; b < weights.ring().num_blocks(); ++b) {
      const auto lease = weights.ring().Acquire();
      EXPECT_TRUE(lease.ok()) << lease.status();
      for (const at::Tensor& view : BlockViews(*lease, weights.device())) {
        tensors.push_back(view.clone());
      }
    }
    return tensors;
  }

  TempFolder folder_;
  const std::vector<TensorSpec> specs_ = Specs();
  std::unique_ptr<Device> device_ = *OpenDevice(DeviceKind::kCpu, 0);
  std::unique_ptr<Checkpoint> checkpoint_;
  std::unique_ptr<ComponentWeights> loaded_;
  std::vector<int64_t> offsets_;
  MappedFile file_;
};

TEST_F(MappedParts, AreOnTheDeviceWhatLoadedOnesAre) {
  ComponentWeights loaded = Load(Kind::kStaged);
  auto mapped = Map(Kind::kStaged);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  for (int round = 0; round < 2; ++round) {
    ASSERT_TRUE(loaded.BringIn().ok());
    ASSERT_TRUE(mapped->BringIn().ok());
    const std::vector<at::Tensor> expected = Tensors(loaded), actual = Tensors(*mapped);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(at::equal(actual[i], expected[i])) << i;
    loaded.PutOut();
    mapped->PutOut();
  }
}

TEST_F(MappedParts, TakeNoMemoryAndStayWhereTheFileIsMapped) {
  const int64_t before = device_->memory().host_bytes;
  auto first = Map(Kind::kStreamed);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(device_->memory().host_bytes, before);
  EXPECT_EQ(device_->memory().used_bytes, 0);
  const ComponentWeights mapped = *std::move(first);
  ASSERT_EQ(mapped.num_parts(), 4);
  for (int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(mapped.part_data(i), file_.bytes().data() + offsets_[i]) << i;
  }
}

TEST_F(MappedParts, StreamAsOneRunOfBytesABlock) {
  auto mapped = Map(Kind::kStreamed, /*resident_blocks=*/1);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  const std::vector<HostBlock> blocks = mapped->host_blocks();
  ASSERT_EQ(blocks.size(), 2u);
  for (size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_EQ(blocks[i].bytes, nullptr);
    ASSERT_EQ(blocks[i].pieces.size(), 1u);
    EXPECT_EQ(blocks[i].pieces[0].source, file_.bytes().data() + offsets_[i + 2]);
    EXPECT_EQ(blocks[i].pieces[0].bytes, blocks[i].layout.total_bytes());
    EXPECT_EQ(blocks[i].pieces[0].file, &file_);
  }
}

TEST_F(MappedParts, ACopyOfAnotherPartOrSizeIsRefused) {
  std::vector<std::byte> bytes(loaded_->part_layout(1).total_bytes() + 1, std::byte{0x77});
  const std::vector<std::byte> before = bytes;
  for (const int64_t part : {int64_t{-1}, loaded_->num_parts()}) {
    EXPECT_EQ(loaded_->CopyPart(part, absl::MakeSpan(bytes)).code(),
              absl::StatusCode::kInvalidArgument);
  }
  for (const size_t size : {bytes.size(), bytes.size() - 2, size_t{0}}) {
    EXPECT_EQ(loaded_->CopyPart(1, absl::MakeSpan(bytes).first(size)).code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(bytes, before);
}

TEST_F(MappedParts, CopiesAreTheTensorsAndZerosBetweenThem) {
  auto mapped = Map(Kind::kStaged);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  for (const ComponentWeights* weights : {&*mapped, loaded_.get()}) {
    for (int64_t i = 0; i < weights->num_parts(); ++i) {
      const BlockLayout& layout = weights->part_layout(i);
      std::vector<std::byte> part(layout.total_bytes(), std::byte{0x77});
      ASSERT_TRUE(weights->CopyPart(i, absl::MakeSpan(part)).ok());
      std::vector<bool> covered(part.size());
      for (const BlockLayout::Tensor& tensor : layout.tensors()) {
        std::fill_n(covered.begin() + tensor.offset, tensor.spec.bytes(), true);
        EXPECT_TRUE(std::equal(part.begin() + tensor.offset,
                               part.begin() + tensor.offset + tensor.spec.bytes(),
                               file_.bytes().begin() + offsets_[i] + tensor.offset));
      }
      for (size_t k = 0; k < part.size(); ++k) {
        if (covered[k]) continue;
        ASSERT_EQ(part[k], std::byte{0}) << "part " << i << " byte " << k;
      }
    }
  }
}

TEST_F(MappedParts, OfAFileThatIsCutAreAnError) {
  auto mapped = Map(Kind::kStaged);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  std::filesystem::resize_file(path(), 4096);
  const absl::Status status = mapped->BringIn();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr(path().native()));
  EXPECT_THAT(std::string(status.message()), HasSubstr("truncated"));
  EXPECT_EQ(device_->memory().used_bytes, 0);
  EXPECT_EQ(Map(Kind::kStaged).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(MappedParts, MustBeThoseOfTheSpecs) {
  offsets_.pop_back();
  EXPECT_EQ(Map(Kind::kStaged).status().code(), absl::StatusCode::kInvalidArgument);
  offsets_.push_back(static_cast<int64_t>(file_.bytes().size()) - 64);
  EXPECT_EQ(Map(Kind::kStaged).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Map(Kind::kResident).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dlo
