// What processes that hold a shard of each block read and keep.
#include "models/component_weights.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "loader/safetensors.h"
#include "loader/test_folder.h"

namespace dlo {
namespace {

constexpr int kBlocks = 16;
constexpr int kShards = 4;

// Each block: four matrices of `rows` x 1024, of which the first three have one scale if quantised,
// and a vector.
std::vector<TensorSpec> Specs(int64_t rows, bool fp8) {
  std::vector<TensorSpec> specs = {{.name = "outside", .shape = {1000}, .dtype = DType::kBF16}};
  for (int b = 0; b < kBlocks; ++b) {
    const std::string prefix = absl::StrCat("blocks.", b, ".");
    const auto add_scale = [&](const std::string& name) {
      if (fp8) specs.push_back({.name = prefix + name, .shape = {1}, .block = b});
    };
    for (const char* name : {"q", "k", "v", "out"}) {
      specs.push_back(
          {.name = prefix + name, .shape = {rows, 1024}, .dtype = DType::kBF16, .block = b});
      const std::string scale = name == std::string("out") ? "out_scale" : "qkv_scale";
      if (fp8) {
        specs.back().dtype = DType::kF8E4M3;
        specs.back().scale = prefix + scale;
      }
      if (name == std::string("v") || name == std::string("out")) add_scale(scale);
    }
    specs.push_back({.name = prefix + "bias", .shape = {1000}, .dtype = DType::kBF16, .block = b});
  }
  return specs;
}

// In float32; every tensor has values of its own.
absl::StatusOr<Checkpoint> WriteCheckpoint(const TempFolder& folder, int64_t rows) {
  std::vector<std::vector<float>> values;
  std::vector<SafetensorsTensor> tensors;
  for (const TensorSpec& spec : Specs(rows, /*fp8=*/false)) {
    std::vector<float>& data = values.emplace_back(spec.num_elements());
    for (size_t i = 0; i < data.size(); ++i) {
      data[i] = static_cast<float>((i * 31 + values.size() * 17) % 1009) *
                static_cast<float>(values.size());
    }
    tensors.push_back({spec.name,
                       DType::kF32,
                       spec.shape,
                       {reinterpret_cast<const std::byte*>(data.data()), data.size() * 4}});
  }
  const absl::Status written = WriteSafetensors(folder / "model.safetensors", tensors);
  if (!written.ok()) return written;
  return Checkpoint::Open(folder.path());
}

absl::StatusOr<ComponentWeights> LoadShardOf(const Checkpoint& checkpoint, int64_t rows, bool fp8,
                                             Device& device, int shard, int shards) {
  return ComponentWeights::Load(
      checkpoint, Specs(rows, fp8), device, {.threads = 2},
      {.kind = WeightPlacement::Kind::kStreamed, .shard = shard, .shards = shards});
}

class Shards : public testing::TestWithParam<bool> {};

// A scale is of whole tensors, wherever the shards cut them.
TEST_P(Shards, OfAllRanksAreTheBlocks) {
  const bool fp8 = GetParam();
  const TempFolder folder;
  const auto checkpoint = WriteCheckpoint(folder, 37);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const auto device = *OpenDevice(DeviceKind::kCpu, 0);
  auto whole = LoadShardOf(*checkpoint, 37, fp8, *device, 0, 1);
  ASSERT_TRUE(whole.ok()) << whole.status();
  std::vector<std::string> joined(kBlocks);
  for (int shard = 0; shard < kShards; ++shard) {
    auto weights = LoadShardOf(*checkpoint, 37, fp8, *device, shard, kShards);
    ASSERT_TRUE(weights.ok()) << weights.status();
    const std::vector<HostBlock> blocks = weights->host_blocks();
    for (int b = 0; b < kBlocks; ++b) {
      joined[b].append(reinterpret_cast<const char*>(blocks[b].bytes),
                       blocks[b].layout.shard_bytes(kShards));
    }
  }
  const std::vector<HostBlock> blocks = whole->host_blocks();
  for (int b = 0; b < kBlocks; ++b) {
    // Between tensors the whole block's memory is not written to.
    for (const BlockLayout::Tensor& tensor : blocks[b].layout.tensors()) {
      const std::string expected(reinterpret_cast<const char*>(blocks[b].bytes + tensor.offset),
                                 tensor.spec.bytes());
      EXPECT_EQ(joined[b].substr(tensor.offset, tensor.spec.bytes()), expected) << tensor.spec.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Shards, testing::Bool(),
                         [](const auto& info) { return info.param ? "Fp8" : "BFloat16"; });

int64_t PeakKib() {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (absl::StartsWith(line, "VmHWM:")) return std::stoll(line.substr(6));
  }
  return -1;
}

// Of a child process, by how much `f` raises it; -1 if `f` fails.
int64_t PeakOfChildKib(const std::function<bool()>& f) {
  int channel[2];
  if (pipe(channel) != 0) return -1;
  const pid_t child = fork();
  if (child == 0) {
    std::ofstream("/proc/self/clear_refs") << "5";  // resets VmHWM
    const int64_t before = PeakKib();
    const int64_t peak = f() ? PeakKib() - before : -1;
    _exit(write(channel[1], &peak, sizeof(peak)) == sizeof(peak) ? 0 : 1);
  }
  close(channel[1]);
  int64_t peak = -1;
  if (read(channel[0], &peak, sizeof(peak)) != sizeof(peak)) peak = -1;
  close(channel[0]);
  int status = 0;
  if (waitpid(child, &status, 0) != child || status != 0) return -1;
  return peak;
}

// From the start, not only once everything is loaded: 256 MiB of float32 on disk.
TEST(ShardedLoading, ARanksPeakIsItsShardsAndOneBlock) {
  constexpr int64_t kRows = 1024;
  constexpr int64_t kBlockKib = 4 * kRows * 1024 * 2 / 1024;
  constexpr int64_t kAllKib = kBlocks * kBlockKib;
  constexpr int64_t kSlackKib = 8 << 10;  // chunks of the file, thread stacks
  const TempFolder folder;
  const auto checkpoint = WriteCheckpoint(folder, kRows);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const auto peak = [&](int shards, bool fp8) {
    return PeakOfChildKib([&, shards, fp8] {
      const auto device = *OpenDevice(DeviceKind::kCpu, 0);
      return LoadShardOf(*checkpoint, kRows, fp8, *device, shards - 1, shards).ok();
    });
  };
  const int64_t whole = peak(1, false);
  EXPECT_GE(whole, kAllKib * 9 / 10) << "the measurement does not see the result";
  EXPECT_LE(whole, kAllKib + kSlackKib);
  const int64_t sharded = peak(kShards, false);
  EXPECT_GE(sharded, kAllKib / kShards * 9 / 10);
  EXPECT_LE(sharded, kAllKib / kShards + kBlockKib + kSlackKib);
  const int64_t fp8 = peak(kShards, true);
  EXPECT_GE(fp8, kAllKib / 2 / kShards * 9 / 10);
  EXPECT_LE(fp8, kAllKib / 2 / kShards + kBlockKib / 2 + kSlackKib);
  RecordProperty("whole_kib", static_cast<int>(whole));
  RecordProperty("sharded_kib", static_cast<int>(sharded));
  RecordProperty("fp8_sharded_kib", static_cast<int>(fp8));
}

}  // namespace
}  // namespace dlo
