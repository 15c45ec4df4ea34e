#include "loader/huge_pages.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "loader/checkpoint.h"
#include "loader/fault_in.h"
#include "loader/test_folder.h"
#include "loader/weights.h"

namespace dlo {
namespace {

constexpr int64_t kMiB = 1 << 20;

// Whether Linux has been asked for huge pages around an address.
bool Advised(const std::byte* at) {
  const auto address = reinterpret_cast<uintptr_t>(at);
  std::ifstream maps("/proc/self/smaps");
  bool around = false;
  for (std::string line; std::getline(maps, line);) {
    std::istringstream text(line);
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    if (text >> std::hex >> begin >> dash >> end && dash == '-') {
      around = begin <= address && address < end;
    } else if (around && line.starts_with("VmFlags:")) {
      return (line + " ").find(" hg ") != std::string::npos;
    }
  }
  ADD_FAILURE() << "nothing is mapped there";
  return false;
}

class HugePagesTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists("/sys/kernel/mm/transparent_hugepage")) {
      GTEST_SKIP() << "this kernel has no huge pages";
    }
    // Tensors of 3, 1 and 4 MiB.
    const std::string bytes(4 * kMiB, '\0');
    const auto data =
        absl::MakeConstSpan(reinterpret_cast<const std::byte*>(bytes.data()), 4 * kMiB);
    for (const auto& [name, mib] : sizes_) {
      tensors_.push_back({name, DType::kI8, {mib * kMiB}, data.subspan(0, mib * kMiB)});
      specs_.push_back({.name = name, .shape = {mib * kMiB}, .dtype = DType::kI8});
    }
    ASSERT_TRUE(WriteSafetensors((folder_ / "model.safetensors").native(), tensors_).ok());
    auto checkpoint = Checkpoint::Open(folder_.path());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    checkpoint_ = *std::move(checkpoint);
  }

  const std::byte* Middle(const std::string& name) {
    const absl::Span<const std::byte> data = checkpoint_.Find(name)->data;
    return data.data() + data.size() / 2;
  }
  void Load(const std::vector<TensorSpec>& specs) {
    std::vector<std::vector<std::byte>> results;
    std::vector<std::byte*> destinations;
    for (const TensorSpec& spec : specs) {
      destinations.push_back(results.emplace_back(spec.bytes()).data());
    }
    const absl::Status status = LoadTensors(checkpoint_, specs, destinations, {.partial = true});
    ASSERT_TRUE(status.ok()) << status;
  }

  const std::vector<std::pair<std::string, int64_t>> sizes_ = {{"a", 3}, {"b", 1}, {"c", 4}};
  TempFolder folder_;
  std::vector<SafetensorsTensor> tensors_;
  std::vector<TensorSpec> specs_;
  Checkpoint checkpoint_;
};

TEST_F(HugePagesTest, PartsThatTouchCountAsOneInAnyOrder) {
  const absl::Span<const std::byte> a = checkpoint_.Find("a")->data;
  AdviseHugePages({a.subspan(kMiB, kMiB), {}, a.subspan(0, kMiB)});
  EXPECT_TRUE(Advised(a.data() + kMiB));
  EXPECT_FALSE(Advised(Middle("c")));
}

TEST_F(HugePagesTest, ShortPartsStayAsTheyAre) {
  const absl::Span<const std::byte> a = checkpoint_.Find("a")->data;
  AdviseHugePages({a.subspan(0, kMiB), a.subspan(2 * kMiB, kMiB)});
  EXPECT_FALSE(Advised(a.data() + kMiB / 2));
  EXPECT_FALSE(Advised(a.data() + 2 * kMiB + kMiB / 2));
}

TEST_F(HugePagesTest, WholeTensorsAreLoadedByThem) {
  Load({specs_[2]});
  EXPECT_TRUE(Advised(Middle("c")));
  EXPECT_FALSE(Advised(Middle("a")));
}

TEST_F(HugePagesTest, SlicesAreNot) {
  TensorSpec half = specs_[2];
  half.slice = TensorSlice{0, 0, half.shape[0]};
  half.shape[0] /= 2;
  Load({half});
  EXPECT_FALSE(Advised(Middle("c")));
}

TEST_F(HugePagesTest, MappedTensorsAreFaultedInByThem) {
  const TensorSource c = *checkpoint_.Find("c");
  const std::vector<PackPiece> pieces = {{.source = c.data.data(),
                                          .bytes = static_cast<int64_t>(c.data.size()),
                                          .file = c.mapping,
                                          .tensor = c.name}};
  ASSERT_TRUE(FaultIn(pieces, 1).ok());
  EXPECT_TRUE(Advised(Middle("c")));
  EXPECT_FALSE(Advised(Middle("a")));
}

}  // namespace
}  // namespace dlo
