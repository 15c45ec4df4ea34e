#include "loader/weights.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "loader/cast.h"
#include "loader/quantize.h"
#include "loader/test_folder.h"

namespace dlo {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

std::string Floats(const std::vector<float>& values) {
  std::string bytes(values.size() * 4, '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::string Shorts(const std::vector<uint16_t>& values) {
  std::string bytes(values.size() * 2, '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// A component with one file; the checkpoint keeps the folder's files mapped.
class LoadTensorsTest : public ::testing::Test {
 protected:
  Checkpoint Write(const std::vector<SafetensorsTensor>& tensors) {
    EXPECT_TRUE(WriteSafetensors(file_, tensors).ok());
    absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(folder_.path());
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    return *std::move(checkpoint);
  }

  // Loads into fresh memory, filled with 0xEE before.
  absl::Status Load(const Checkpoint& checkpoint, const std::vector<TensorSpec>& specs,
                    const LoadOptions& options = {}) {
    results_.clear();
    std::vector<std::byte*> destinations;
    destinations.reserve(specs.size());
    for (const TensorSpec& spec : specs) {
      results_.emplace_back(static_cast<size_t>(spec.bytes()), std::byte{0xEE});
    }
    for (auto& result : results_) destinations.push_back(result.data());
    return LoadTensors(checkpoint, specs, destinations, options);
  }

  std::string Result(size_t i) const {
    return std::string(reinterpret_cast<const char*>(results_[i].data()), results_[i].size());
  }

  // That nothing is written is part of every refusal.
  std::string Refusal(const Checkpoint& checkpoint, const std::vector<TensorSpec>& specs,
                      const LoadOptions& options = {}) {
    absl::Status status = Load(checkpoint, specs, options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    for (const auto& result : results_) EXPECT_THAT(result, Each(std::byte{0xEE}));
    return std::string(status.message());
  }

  TempFolder folder_;
  const std::string file_ = (folder_ / "model.safetensors").native();
  const std::string four_ = Floats({1.0f, -2.5f, 0.0f, 65504.0f});
  std::vector<std::vector<std::byte>> results_;
};

TEST_F(LoadTensorsTest, CastsEachTensorFromItsDTypeToItsSpecs) {
  const std::string brain = Shorts({0x3F80, 0xC020});  // 1, -2.5
  const std::string half = Shorts({0x3C00, 0xC100});   // 1, -2.5
  const std::string ints("\x01\x02\x03", 3);
  const Checkpoint checkpoint = Write({{"from_f32", DType::kF32, {2, 2}, AsBytes(four_)},
                                       {"from_bf16", DType::kBF16, {2}, AsBytes(brain)},
                                       {"from_f16", DType::kF16, {2}, AsBytes(half)},
                                       {"none", DType::kF32, {0, 3}, {}},
                                       {"ints", DType::kU8, {3}, AsBytes(ints)}});
  ASSERT_TRUE(Load(checkpoint, {{.name = "ints", .shape = {3}, .dtype = DType::kU8},
                                {.name = "from_f16", .shape = {2}, .dtype = DType::kBF16},
                                {.name = "from_f32", .shape = {2, 2}, .dtype = DType::kF16},
                                {.name = "from_bf16", .shape = {2}, .dtype = DType::kF32},
                                {.name = "none", .shape = {0, 3}, .dtype = DType::kBF16}})
                  .ok());
  EXPECT_EQ(Result(0), ints);
  EXPECT_EQ(Result(1), brain);
  EXPECT_EQ(Result(2), Shorts({0x3C00, 0xC100, 0x0000, 0x7BFF}));
  EXPECT_EQ(Result(3), Floats({1.0f, -2.5f}));
}

// Neither the header's length nor the tensors before need keep an element's alignment.
TEST_F(LoadTensorsTest, ReadsMisalignedData) {
  std::string header = R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                       R"("a":{"dtype":"F32","shape":[4],"data_offsets":[1,17]}})";
  while ((8 + header.size() + 1) % 4 != 3) header += ' ';
  const uint64_t length = header.size();
  std::string text(8, '\0');
  std::memcpy(text.data(), &length, 8);
  folder_.Write("model.safetensors", text + header + "x" + four_);
  auto checkpoint = Checkpoint::Open(folder_.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_EQ(reinterpret_cast<uintptr_t>(checkpoint->Find("a")->data.data()) % 4, 3u);
  ASSERT_TRUE(Load(*checkpoint, {{.name = "a", .shape = {4}, .dtype = DType::kBF16},
                                 {.name = "b", .shape = {1}, .dtype = DType::kU8}})
                  .ok());
  EXPECT_EQ(Result(0), Shorts({0x3F80, 0xC020, 0x0000, 0x4780}));
}

TEST_F(LoadTensorsTest, LargeTensorsArriveWholeWithAnyNumberOfThreads) {
  // Some MiB and an odd rest, so that no chunk or page boundary is at an end.
  std::vector<float> values(3 * 1024 * 1024 / 4 * 2 + 1237);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) * 0.37f;
  const std::string bytes = Floats(values);
  const Checkpoint checkpoint =
      Write({{"odd", DType::kU8, {3}, AsBytes(bytes).subspan(0, 3)},
             {"x", DType::kF32, {static_cast<int64_t>(values.size())}, AsBytes(bytes)},
             {"y", DType::kF32, {static_cast<int64_t>(values.size())}, AsBytes(bytes)}});
  for (int threads : {0, 1, 2, 7}) {
    ASSERT_TRUE(
        Load(checkpoint,
             {{.name = "x", .shape = {static_cast<int64_t>(values.size())}, .dtype = DType::kF32},
              {.name = "y", .shape = {static_cast<int64_t>(values.size())}, .dtype = DType::kBF16},
              {.name = "odd", .shape = {3}, .dtype = DType::kU8}},
             {.threads = threads})
            .ok());
    EXPECT_TRUE(Result(0) == bytes) << threads << " threads";
    size_t wrong = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      uint16_t got;
      std::memcpy(&got, results_[1].data() + 2 * i, 2);
      uint32_t widened = static_cast<uint32_t>(got) << 16;
      float back;
      std::memcpy(&back, &widened, 4);
      if (std::abs(back - values[i]) > values[i] / 256) ++wrong;
    }
    EXPECT_EQ(wrong, 0u) << threads << " threads";
  }
}

TEST_F(LoadTensorsTest, ReadsFromSeveralShards) {
  ASSERT_TRUE(WriteSafetensors(folder_ / "1", {{{"a", DType::kF32, {4}, AsBytes(four_)}}}).ok());
  ASSERT_TRUE(WriteSafetensors(folder_ / "2", {{{"b", DType::kF32, {4}, AsBytes(four_)}}}).ok());
  folder_.Write("model.safetensors.index.json", R"({"weight_map":{"a":"1","b":"2"}})");
  auto checkpoint = Checkpoint::Open(folder_.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_TRUE(Load(*checkpoint, {{.name = "a", .shape = {4}}, {.name = "b", .shape = {4}}}).ok());
  EXPECT_EQ(Result(0), four_);
  EXPECT_EQ(Result(1), four_);
  // A message names the shard, not just the folder.
  EXPECT_THAT(Refusal(*checkpoint, {{.name = "a", .shape = {4}}}),
              HasSubstr((folder_ / "2").native()));
}

TEST_F(LoadTensorsTest, TakesTheNameBeforeTheAliasesAndTheseInOrder) {
  const std::string other = Floats({9, 9, 9, 9});
  const Checkpoint checkpoint = Write({{"shared.weight", DType::kF32, {4}, AsBytes(four_)},
                                       {"old.weight", DType::kF32, {4}, AsBytes(other)}});
  const std::vector<std::string> aliases = {"absent", "shared.weight", "old.weight"};
  ASSERT_TRUE(Load(checkpoint, {{.name = "embed.weight", .shape = {4}, .aliases = aliases}}).ok());
  EXPECT_EQ(Result(0), four_);
  ASSERT_TRUE(Load(checkpoint, {{.name = "old.weight", .shape = {4}, .aliases = aliases}}).ok());
  EXPECT_EQ(Result(0), other);
}

TEST_F(LoadTensorsTest, NamesWhatIsMissing) {
  const Checkpoint checkpoint = Write({{"a", DType::kF32, {4}, AsBytes(four_)}});
  EXPECT_THAT(
      Refusal(checkpoint, {{.name = "a", .shape = {4}}, {.name = "b.weight", .shape = {4}}}),
      AllOf(HasSubstr("missing, 1 in all: \"b.weight\""), HasSubstr(folder_.path().native()),
            Not(HasSubstr("\"a\""))));
}

TEST_F(LoadTensorsTest, NamesWhatIsUnexpectedWithItsFile) {
  const Checkpoint checkpoint = Write(
      {{"a", DType::kF32, {4}, AsBytes(four_)}, {"lora.up", DType::kF32, {4}, AsBytes(four_)}});
  EXPECT_THAT(Refusal(checkpoint, {{.name = "a", .shape = {4}}}),
              HasSubstr(absl::StrCat("not the model's, 1 in all: \"lora.up\" in ", file_)));
}

TEST_F(LoadTensorsTest, PassesOverUnexpectedTensorsByPartOfTheirName) {
  const Checkpoint checkpoint =
      Write({{"a", DType::kF32, {4}, AsBytes(four_)},
             {"blocks.0.attn2.norm_added_q.weight", DType::kF32, {4}, AsBytes(four_)},
             {"blocks.1.attn2.norm_added_q.weight", DType::kF32, {4}, AsBytes(four_)}});
  EXPECT_TRUE(
      Load(checkpoint, {{.name = "a", .shape = {4}}}, {.ignore_unexpected = {"x", "norm_added_q"}})
          .ok());
  EXPECT_THAT(
      Refusal(checkpoint, {{.name = "a", .shape = {4}}}, {.ignore_unexpected = {"added_k"}}),
      HasSubstr("2 in all"));
  // Only the unexpected: a tensor that is asked for is still loaded and must still be there.
  EXPECT_THAT(Refusal(checkpoint, {{.name = "a", .shape = {4}}, {.name = "norm_added_q"}},
                      {.ignore_unexpected = {"norm_added_q"}}),
              HasSubstr("missing, 1 in all: \"norm_added_q\""));
}

TEST_F(LoadTensorsTest, NamesBothShapesOfAMisshapenTensor) {
  const Checkpoint checkpoint = Write({{"a", DType::kF32, {2, 2}, AsBytes(four_)}});
  EXPECT_THAT(Refusal(checkpoint, {{.name = "a", .shape = {4}}}),
              HasSubstr(absl::StrCat("\"a\" in ", file_, " is [2, 2] instead of [4]")));
  EXPECT_THAT(Refusal(checkpoint, {{.name = "a", .shape = {4, 1}}}), HasSubstr("[4, 1]"));
  EXPECT_THAT(Refusal(checkpoint, {{.name = "a", .shape = {2, 2, 1}}}), HasSubstr("[2, 2, 1]"));
}

TEST_F(LoadTensorsTest, NamesADTypeThatCannotBeCast) {
  const Checkpoint checkpoint = Write({{"a", DType::kI32, {4}, AsBytes(four_)}});
  EXPECT_THAT(Refusal(checkpoint, {{.name = "a", .shape = {4}, .dtype = DType::kBF16}}),
              HasSubstr("is I32, wanted as BF16"));
}

TEST_F(LoadTensorsTest, ReportsEveryKindAtOnceAndCountsTheRest) {
  const Checkpoint checkpoint = Write({{"misshapen", DType::kF32, {4}, AsBytes(four_)},
                                       {"unexpected", DType::kF32, {4}, AsBytes(four_)}});
  std::vector<TensorSpec> specs = {{.name = "misshapen", .shape = {2}}};
  for (int i = 0; i < 500; ++i) {
    specs.push_back({.name = absl::StrCat("missing.", i), .shape = {1}});
  }
  const std::string message = Refusal(checkpoint, specs);
  EXPECT_THAT(message, AllOf(HasSubstr("missing, 500 in all: \"missing.0\", \"missing.1\""),
                             HasSubstr("\"misshapen\""), HasSubstr("\"unexpected\"")));
  EXPECT_LT(message.size(), 1000u);
}

TEST_F(LoadTensorsTest, RefusesListsThatContradictThemselves) {
  const Checkpoint checkpoint = Write({{"a", DType::kF32, {4}, AsBytes(four_)}});
  const std::vector<TensorSpec> specs = {{.name = "a", .shape = {4}}};
  EXPECT_EQ(LoadTensors(checkpoint, specs, {}).code(), absl::StatusCode::kInvalidArgument);
  std::byte* nowhere[] = {nullptr};
  EXPECT_THAT(std::string(LoadTensors(checkpoint, specs, nowhere).message()),
              HasSubstr("no destination, 1 in all: \"a\""));
  EXPECT_THAT(Refusal(checkpoint, {{.name = "a", .shape = {4}}, {.name = "a", .shape = {4}}}),
              HasSubstr("asked for twice, 1 in all: \"a\""));
}

TEST_F(LoadTensorsTest, AFileTruncatedSinceItWasOpenedIsAnError) {
  void* page = mmap(nullptr, 1, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const bool kernel_can_tell = madvise(page, 1, 22 /* MADV_POPULATE_READ */) == 0;
  munmap(page, 1);
  if (!kernel_can_tell) GTEST_SKIP() << "Linux before 5.14";
  const std::string data(1 << 20, 'x');
  const Checkpoint checkpoint = Write({{"a", DType::kU8, {1 << 20}, AsBytes(data)}});
  ASSERT_EQ(truncate(file_.c_str(), 100), 0);
  absl::Status status =
      Load(checkpoint, {{.name = "a", .shape = {1 << 20}, .dtype = DType::kU8}}, {.threads = 2});
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr(file_));
}

int64_t StatusKib(const std::string& key) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (absl::StartsWith(line, key + ":")) return std::stoll(line.substr(key.size() + 1));
  }
  return -1;
}

// The process's peak while loading, less what it held before, in KiB; the destinations are part of
// it.
int64_t PeakWhileLoadingKib(const Checkpoint& checkpoint, const std::vector<TensorSpec>& specs) {
  int64_t total = 0;
  for (const TensorSpec& spec : specs) total += spec.bytes();
  void* memory = mmap(nullptr, static_cast<size_t>(total), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  std::vector<std::byte*> destinations;
  std::byte* next = static_cast<std::byte*>(memory);
  for (const TensorSpec& spec : specs) {
    destinations.push_back(next);
    next += spec.bytes();
  }
  std::ofstream("/proc/self/clear_refs") << "5";  // resets VmHWM
  const int64_t before = StatusKib("VmHWM");
  if (!LoadTensors(checkpoint, specs, destinations, {.threads = 4}).ok()) return -1;
  return StatusKib("VmHWM") - before;
}

class LoadTensorsPeak : public LoadTensorsTest, public ::testing::WithParamInterface<bool> {};

TEST_P(LoadTensorsPeak, IsTheResultAndLessThanOneTensor) {
#if defined(DLO_SANITIZED)
  GTEST_SKIP() << "a sanitizer's own memory would be measured";
#endif
  constexpr int64_t kElements = 4 << 20;
  constexpr int64_t kTensors = 6;
  std::vector<SafetensorsTensor> tensors;
  std::vector<TensorSpec> specs;
  const std::string data(kElements * 4, '\x3C');
  for (int64_t i = 0; i < kTensors; ++i) {
    tensors.push_back({absl::StrCat("t", i), DType::kF32, {kElements}, AsBytes(data)});
    specs.push_back({.name = absl::StrCat("t", i), .shape = {kElements}, .dtype = DType::kBF16});
    if (!GetParam()) continue;
    specs.back().dtype = DType::kF8E4M3;
    specs.back().scale = absl::StrCat("t", i, "_scale");
    specs.push_back({.name = specs.back().scale, .shape = {1}, .dtype = DType::kF32});
  }
  const Checkpoint checkpoint = Write(tensors);

  int channel[2];
  ASSERT_EQ(pipe(channel), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const int64_t peak = PeakWhileLoadingKib(checkpoint, specs);
    _exit(write(channel[1], &peak, sizeof(peak)) == sizeof(peak) ? 0 : 1);
  }
  close(channel[1]);
  int64_t peak_kib = -1;
  EXPECT_EQ(read(channel[0], &peak_kib, sizeof(peak_kib)), static_cast<ssize_t>(sizeof(peak_kib)));
  close(channel[0]);
  int exit_status = 0;
  ASSERT_EQ(waitpid(child, &exit_status, 0), child);
  EXPECT_EQ(exit_status, 0);

  const int64_t result_kib = kTensors * kElements * (GetParam() ? 1 : 2) / 1024;
  const int64_t one_tensor_kib = kElements * 4 / 1024;
  EXPECT_GE(peak_kib, result_kib * 9 / 10) << "the measurement does not see the result";
  EXPECT_LT(peak_kib, result_kib + one_tensor_kib);
  RecordProperty("peak_over_result_kib", static_cast<int>(peak_kib - result_kib));
}

INSTANTIATE_TEST_SUITE_P(Specs, LoadTensorsPeak, ::testing::Bool(), [](const auto& info) {
  return info.param ? "OfQuantisedTensors" : "OfCastTensors";
});

// Else a process that loads a large file has its pages on top of the result.
TEST_F(LoadTensorsTest, LeavesNoPagesOfTheFileMapped) {
#if defined(DLO_SANITIZED)
  GTEST_SKIP() << "too slow to race";
#endif
  constexpr int64_t kElements = 16 << 20;
  const std::string data(kElements * 4, '\x3C');
  const Checkpoint checkpoint = Write({{"t", DType::kF32, {kElements}, AsBytes(data)}});
  ASSERT_TRUE(
      Load(checkpoint, {{.name = "t", .shape = {kElements}, .dtype = DType::kBF16}}, {.threads = 4})
          .ok());
  std::ifstream maps("/proc/self/smaps");
  bool ours = false;
  int64_t mapped_kib = -1;
  for (std::string line; std::getline(maps, line);) {
    if (line.find('-') < line.find(' ')) ours = absl::EndsWith(line, file_);
    if (ours && absl::StartsWith(line, "Rss:")) {
      mapped_kib = std::max<int64_t>(mapped_kib, 0) + std::stoll(line.substr(4));
    }
  }
  EXPECT_GE(mapped_kib, 0) << "no such mapping";
  EXPECT_LE(mapped_kib, 64);
}

// ---- Slices ----

constexpr DType kFloats[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kF64};

// Small numbers that every dtype holds exactly.
std::string Numbers(DType dtype, int64_t count) {
  std::vector<float> floats(count);
  for (int64_t i = 0; i < count; ++i) floats[i] = static_cast<float>(i % 251) - 125;
  if (dtype == DType::kF64) {
    const std::vector<double> doubles(floats.begin(), floats.end());
    return std::string(reinterpret_cast<const char*>(doubles.data()), doubles.size() * 8);
  }
  std::string bytes(count * DTypeBytes(dtype), '\0');
  CastElements(DType::kF32, reinterpret_cast<const std::byte*>(floats.data()), dtype,
               reinterpret_cast<std::byte*>(bytes.data()), count);
  return bytes;
}

// The spec's part for `rank` of `tp` along `dim`.
TensorSpec Cut(TensorSpec spec, int dim, int rank, int tp) {
  const int64_t full = spec.shape[dim];
  spec.shape[dim] = full / tp;
  spec.slice = TensorSlice{.dim = dim, .begin = rank * full / tp, .full = full};
  return spec;
}

// Puts slices along `dim`, in order, back together.
std::string Join(const std::vector<std::string>& slices, const std::vector<int64_t>& shape, int dim,
                 int64_t element_bytes) {
  int64_t outer = 1, inner = element_bytes;
  for (int i = 0; i < static_cast<int>(shape.size()); ++i) (i < dim ? outer : inner) *= shape[i];
  const int64_t run = inner / static_cast<int64_t>(slices.size());
  std::string whole;
  for (int64_t o = 0; o < outer; ++o) {
    for (const std::string& slice : slices) whole += slice.substr(o * run, run);
  }
  return whole;
}

TEST_F(LoadTensorsTest, TheSlicesOfAllRanksAreTheTensor) {
  // The last is larger than a chunk in each direction.
  const std::vector<std::vector<int64_t>> shapes = {{12}, {12, 20}, {4, 12, 8}, {4, 700'000}};
  for (const std::vector<int64_t>& shape : shapes) {
    const bool large = shape.back() > 1000;
    for (DType from : kFloats) {
      if (large && from != DType::kF32) continue;
      TensorSpec spec = {.name = "w", .shape = shape};
      const std::string data = Numbers(from, spec.num_elements());
      const std::string odd = "odd";
      const Checkpoint checkpoint = Write({{"first", DType::kU8, {3}, AsBytes(odd)},
                                           {"w", from, shape, AsBytes(data)},
                                           {"last", DType::kU8, {3}, AsBytes(odd)}});
      for (DType to : kFloats) {
        if (!CanCast(from, to)) continue;
        spec.dtype = to;
        ASSERT_TRUE(Load(checkpoint, {spec}, {.partial = true}).ok());
        const std::string whole = Result(0);
        for (int dim = 0; dim < static_cast<int>(shape.size()); ++dim) {
          for (int tp : {1, 2, 4}) {
            std::vector<std::string> slices;
            for (int rank = 0; rank < tp; ++rank) {
              const absl::Status status = Load(checkpoint, {Cut(spec, dim, rank, tp)},
                                               {.partial = true, .threads = 1 + rank % 2});
              ASSERT_TRUE(status.ok()) << status;
              slices.push_back(Result(0));
            }
            EXPECT_EQ(Join(slices, shape, dim, DTypeBytes(to)), whole)
                << DTypeName(from) << " to " << DTypeName(to) << ", dimension " << dim << " of "
                << shape.size() << ", tp " << tp;
          }
        }
      }
    }
  }
}

TEST_F(LoadTensorsTest, RefusesSlicesThatAreNoPartByName) {
  const std::string data = Floats(std::vector<float>(32));
  const Checkpoint checkpoint = Write({{"w", DType::kF32, {8, 4}, AsBytes(data)}});
  const auto refusal = [&](std::vector<int64_t> shape, TensorSlice slice) {
    return Refusal(checkpoint, {{.name = "w", .shape = std::move(shape), .slice = slice}});
  };
  EXPECT_THAT(
      refusal({4, 4}, {.dim = 0, .begin = 6, .full = 8}),
      HasSubstr(absl::StrCat("\"w\" in ", file_, " takes 6 to 10 of the 8 in dimension 0")));
  EXPECT_THAT(refusal({4, 4}, {.dim = 0, .begin = -2, .full = 8}), HasSubstr("takes -2 to 2"));
  EXPECT_THAT(refusal({4, 4}, {.dim = 2, .begin = 0, .full = 8}),
              HasSubstr("is cut along dimension 2 of 2"));
  EXPECT_THAT(refusal({4, 4}, {.dim = -1, .begin = 0, .full = 8}), HasSubstr("dimension -1"));
  // It is the whole tensor whose shape must be the checkpoint's.
  EXPECT_THAT(refusal({4, 4}, {.dim = 0, .begin = 0, .full = 16}),
              HasSubstr("is [8, 4] instead of [16, 4]"));
  EXPECT_THAT(refusal({8, 2}, {.dim = 0, .begin = 0, .full = 8}),
              HasSubstr("is [8, 4] instead of [8, 2]"));
  EXPECT_THAT(refusal({8, 2}, {.dim = 1, .begin = 2, .full = 6}),
              HasSubstr("is [8, 4] instead of [8, 6]"));
  EXPECT_TRUE(
      Load(checkpoint, {{.name = "w", .shape = {8, 1}, .slice = TensorSlice{1, 3, 4}}}).ok());
}

// How many pages of the file are in the page cache.
int64_t CachedPages(const MappedFile& file) {
  std::vector<unsigned char> pages((file.bytes().size() + 4095) / 4096);
  if (mincore(const_cast<std::byte*>(file.bytes().data()), file.bytes().size(), pages.data()) !=
      0) {
    return -1;
  }
  int64_t count = 0;
  for (unsigned char page : pages) count += page & 1;
  return count;
}

void DropFromCache(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY);
  fsync(fd);
  posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  close(fd);
}

TEST_F(LoadTensorsTest, ReadsOnlyTheSlicesFromTheDisk) {
  constexpr int64_t kRows = 1024, kColumns = 8192, kTp = 4, kPage = 4096;
  const std::string data(kRows * kColumns * 4, '\x3C');
  const TensorSpec spec = {.name = "w", .shape = {kRows, kColumns}, .dtype = DType::kBF16};
  const Checkpoint checkpoint = Write({{"w", DType::kF32, spec.shape, AsBytes(data)}});
  for (int dim : {0, 1}) {
    DropFromCache(file_);  // all but the header, which is mapped
    const int64_t before = CachedPages(checkpoint.files()[0].mapping());
    if (before < 0 || before > 64) GTEST_SKIP() << "the temporary folder is not on a disk";
    rusage usage_before, usage_after;
    getrusage(RUSAGE_SELF, &usage_before);
    std::atomic<int64_t> read_bytes = 0;
    ASSERT_TRUE(
        Load(checkpoint, {Cut(spec, dim, 2, kTp)}, {.threads = 2, .read_bytes = &read_bytes}).ok());
    getrusage(RUSAGE_SELF, &usage_after);
    EXPECT_EQ(read_bytes, kRows * kColumns * 4 / kTp);
    // A run of columns is 8 KiB and may begin within a page.
    const int64_t pages = dim == 0 ? kRows * kColumns * 4 / kTp / kPage + 1 : kRows * 3;
    EXPECT_LE(CachedPages(checkpoint.files()[0].mapping()), before + pages);
    EXPECT_LE((usage_after.ru_inblock - usage_before.ru_inblock) * 512, (pages + 8) * kPage);
    EXPECT_GE((usage_after.ru_inblock - usage_before.ru_inblock) * 512,
              kRows * kColumns * 4 / kTp - 64 * kPage)
        << "the measurement does not see what is read";
  }
}

// ---- Quantised tensors ----

// "w" and its scale.
std::vector<TensorSpec> Quantised(std::vector<int64_t> shape) {
  return {{.name = "w", .shape = std::move(shape), .dtype = DType::kF8E4M3, .scale = "w_scale"},
          {.name = "w_scale", .shape = {1}, .dtype = DType::kF32}};
}

float FloatOf(const std::string& bytes) {
  float value = 0;
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

// By loader/quantize.h, in one piece.
std::string QuantiseByHand(DType from, const std::string& data, float scale) {
  std::string out(data.size() / DTypeBytes(from), '\0');
  QuantizeE4M3(from, reinterpret_cast<const std::byte*>(data.data()), scale,
               reinterpret_cast<std::byte*>(out.data()), out.size());
  return out;
}

TEST_F(LoadTensorsTest, QuantisesWithTheLargestMagnitudeOfTheTensor) {
  for (DType from : kFloats) {
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{3, 5}, {1500, 1001}}) {
      const std::string data = Numbers(from, shape[0] * shape[1]);
      const Checkpoint checkpoint = Write({{"w", from, shape, AsBytes(data)}});
      for (int threads : {1, 2, 7}) {
        const absl::Status status = Load(checkpoint, Quantised(shape), {.threads = threads});
        ASSERT_TRUE(status.ok()) << status;
        const float scale = 125.0f / 448;
        EXPECT_EQ(FloatOf(Result(1)), scale);
        EXPECT_EQ(Result(0), QuantiseByHand(from, data, scale)) << DTypeName(from);
      }
    }
  }
}

TEST_F(LoadTensorsTest, TensorsThatNameOneScaleShareIt) {
  const std::string a = Floats({1, -2}), b = Floats({3, 4}), c = Floats({100, 0});
  const Checkpoint checkpoint = Write({{"a", DType::kF32, {2}, AsBytes(a)},
                                       {"b", DType::kF32, {2}, AsBytes(b)},
                                       {"c", DType::kF32, {2}, AsBytes(c)}});
  const DType f8 = DType::kF8E4M3;
  ASSERT_TRUE(Load(checkpoint, {{.name = "ab", .shape = {1}},
                                {.name = "b", .shape = {2}, .dtype = f8, .scale = "ab"},
                                {.name = "c", .shape = {2}, .dtype = f8, .scale = "c_scale"},
                                {.name = "a", .shape = {2}, .dtype = f8, .scale = "ab"},
                                {.name = "c_scale", .shape = {1}}})
                  .ok());
  EXPECT_EQ(FloatOf(Result(0)), 4.0f / 448);
  EXPECT_EQ(FloatOf(Result(4)), 100.0f / 448);
  EXPECT_EQ(Result(1), QuantiseByHand(DType::kF32, b, 4.0f / 448));
  EXPECT_EQ(Result(2), QuantiseByHand(DType::kF32, c, 100.0f / 448));
  EXPECT_EQ(Result(3), QuantiseByHand(DType::kF32, a, 4.0f / 448));
}

TEST_F(LoadTensorsTest, ASliceIsQuantisedWithItsOwnScale) {
  const std::string data = Floats({1, 50, 2, 60, 3, 70, 4, 80});
  const Checkpoint checkpoint = Write({{"w", DType::kF32, {4, 2}, AsBytes(data)}});
  std::vector<TensorSpec> specs = Quantised({4, 2});
  specs[0] = Cut(specs[0], 1, 0, 2);
  ASSERT_TRUE(Load(checkpoint, specs).ok());
  EXPECT_EQ(FloatOf(Result(1)), 4.0f / 448);
  EXPECT_EQ(Result(0), QuantiseByHand(DType::kF32, Floats({1, 2, 3, 4}), 4.0f / 448));
}

TEST_F(LoadTensorsTest, ZerosHaveTheScaleOne) {
  const std::string zeros = Floats(std::vector<float>(1000));
  const Checkpoint checkpoint =
      Write({{"w", DType::kF32, {1000}, AsBytes(zeros)}, {"none", DType::kF32, {0}, {}}});
  std::vector<TensorSpec> specs = Quantised({1000});
  specs.push_back({.name = "none", .shape = {0}, .dtype = DType::kF8E4M3, .scale = "none_scale"});
  specs.push_back({.name = "none_scale", .shape = {1}});
  ASSERT_TRUE(Load(checkpoint, specs).ok());
  EXPECT_EQ(FloatOf(Result(1)), 1);
  EXPECT_EQ(FloatOf(Result(3)), 1);
  EXPECT_EQ(Result(0), std::string(1000, '\0'));
}

TEST_F(LoadTensorsTest, AValueThatIsNotFiniteIsAnErrorThatNamesFileAndTensor) {
  for (float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    std::vector<float> values(3'000'000, 1);
    values[2'500'000] = bad;
    const std::string data = Floats(values), fine = Floats(std::vector<float>(3'000'000, 1));
    const Checkpoint checkpoint = Write({{"fine", DType::kF32, {3'000'000}, AsBytes(fine)},
                                         {"w", DType::kF32, {3'000'000}, AsBytes(data)}});
    for (int threads : {1, 3}) {
      const absl::Status status =
          Load(checkpoint, Quantised({3'000'000}), {.partial = true, .threads = threads});
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("\"w\""), HasSubstr(file_), HasSubstr("not finite")));
    }
  }
}

TEST_F(LoadTensorsTest, RefusesScalesThatCannotBe) {
  const std::string ints(4, '\1');
  const Checkpoint checkpoint = Write({{"w", DType::kF32, {4}, AsBytes(four_)}});
  std::vector<TensorSpec> specs = Quantised({4});
  specs.pop_back();
  EXPECT_THAT(Refusal(checkpoint, specs),
              HasSubstr("\"w\" has the scale \"w_scale\", which is not asked for"));
  specs = Quantised({4});
  specs[1].shape = {4};
  EXPECT_THAT(Refusal(checkpoint, specs), HasSubstr("\"w_scale\" is a scale, but not one F32"));
  specs = Quantised({4});
  specs[1].dtype = DType::kBF16;
  EXPECT_THAT(Refusal(checkpoint, specs), HasSubstr("\"w_scale\" is a scale, but not one F32"));
  specs = Quantised({4});
  specs[0].dtype = DType::kBF16;
  EXPECT_THAT(Refusal(checkpoint, specs), HasSubstr("\"w\" has a scale, but is BF16"));
  // A checkpoint that is quantised already is not what is asked for.
  const Checkpoint quantised = Write(
      {{"w", DType::kF8E4M3, {4}, AsBytes(ints)}, {"w_scale", DType::kF32, {4}, AsBytes(four_)}});
  EXPECT_THAT(
      Refusal(quantised, Quantised({4})),
      AllOf(HasSubstr("\"w\" in "), HasSubstr("is F8_E4M3, wanted as F8_E4M3 by quantising"),
            HasSubstr("not the model's, 1 in all: \"w_scale\"")));
}

}  // namespace
}  // namespace dlo
