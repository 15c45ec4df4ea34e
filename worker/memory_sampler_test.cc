#include "worker/memory_sampler.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>

#include "absl/time/clock.h"
#include "worker/process_memory.h"

namespace dlo {
namespace {

bool WaitFor(const std::function<bool()>& condition) {
  for (const absl::Time end = absl::Now() + absl::Seconds(30); absl::Now() < end;) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return false;
}

class FakePipeline : public VideoPipeline {
 public:
  absl::StatusOr<GenerationStats> Generate(const VideoRequest&, GenerationObserver&) override {
    return absl::UnimplementedError("");
  }
  PipelineMemory memory() const override {
    return {.used_bytes = used, .peak_bytes = 900, .weights_bytes = 500, .pinned_bytes = 70};
  }
  std::atomic<int64_t> used = 800;
};

TEST(ProcessMemoryTest, ReadsTheThreeFieldsOfSmapsRollup) {
  std::istringstream text(
      "55e0-7ffc ---p 00000000 00:00 0    [rollup]\n"
      "Rss:                9000 kB\n"
      "Pss:                 251 kB\n"
      "Pss_Dirty:           112 kB\n"
      "Shared_Clean:       1548 kB\n"
      "Private_Clean:        44 kB\n"
      "Private_Dirty:         7 kB\n");
  v1::RankMemory memory;
  ParseSmapsRollup(text, &memory);
  EXPECT_EQ(memory.host_pss_bytes(), 251 << 10);
  EXPECT_EQ(memory.host_private_dirty_bytes(), 7 << 10);
  EXPECT_EQ(memory.host_shared_clean_bytes(), 1548 << 10);
}

TEST(ProcessMemoryTest, FieldsThatTheKernelDoesNotTellStayUnset) {
  std::istringstream text("Pss:    1 kB\n");
  v1::RankMemory memory;
  ParseSmapsRollup(text, &memory);
  EXPECT_TRUE(memory.has_host_pss_bytes());
  EXPECT_FALSE(memory.has_host_private_dirty_bytes());
  EXPECT_FALSE(memory.has_host_shared_clean_bytes());
}

TEST(ProcessMemoryTest, CountsReadOnlySharedMappingsOfFilesAlone) {
  std::istringstream text(
      "1000-3000 r--s 00000000 08:01 12    /models/with a space.safetensors\n"
      "3000-4000 r--s 00001000 08:01 12    /models/b\n"
      "4000-8000 r--p 00000000 08:01 13    /lib/private\n"
      "8000-9000 rw-s 00000000 08:01 14    /tmp/shared\n"
      "9000-a000 r--s 00000000 00:05 15    /dev/nvidia0\n"
      "a000-b000 r--s 00000000 00:00 0\n"
      "b000-c000 rw-p 00000000 00:00 0     [heap]\n");
  EXPECT_EQ(MappedFileBytes(text), 0x3000);
}

TEST(ProcessMemoryTest, SeesAFileThatThisProcessMaps) {
  char path[] = "/tmp/mapped-XXXXXX";
  const int fd = mkstemp(path);
  ASSERT_GE(fd, 0);
  constexpr int64_t kBytes = 5 << 20;
  ASSERT_EQ(ftruncate(fd, kBytes), 0);
  const auto mapped = [] {
    std::ifstream maps("/proc/self/maps");
    return MappedFileBytes(maps);
  };
  const int64_t before = mapped();
  void* const data = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(data, MAP_FAILED);
  EXPECT_EQ(mapped() - before, kBytes);
  munmap(data, kBytes);
  close(fd);
  unlink(path);
}

TEST(MemorySamplerTest, TellsWhatTheProcessHoldsNow) {
  MemorySampler sampler(absl::Milliseconds(5));
  ASSERT_TRUE(WaitFor([&] { return sampler.latest().host_private_dirty_bytes() > 0; }));
  const int64_t before = sampler.latest().host_private_dirty_bytes();
  constexpr int64_t kBytes = 64 << 20;
  void* const data =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(data, MAP_FAILED);
  std::memset(data, 1, kBytes);
  // Not all of it: a look may have come while it was written to.
  constexpr int64_t kMost = kBytes * 9 / 10;
  EXPECT_TRUE(
      WaitFor([&] { return sampler.latest().host_private_dirty_bytes() >= before + kMost; }));
  EXPECT_GE(sampler.latest().host_pss_bytes(), kMost);
  munmap(data, kBytes);
}

TEST(MemorySamplerTest, LooksAtAPipelineAtOnceAndNeverAfterItWasTakenAway) {
  MemorySampler sampler(absl::Hours(1));
  {
    FakePipeline pipeline;
    sampler.SetPipeline(&pipeline);
    ASSERT_TRUE(WaitFor([&] { return sampler.latest().device_used_bytes() == 800; }));
    const v1::RankMemory memory = sampler.latest();
    EXPECT_EQ(memory.device_peak_bytes(), 900);
    EXPECT_EQ(memory.device_weights_bytes(), 500);
    EXPECT_EQ(memory.device_activations_bytes(), 300);
    EXPECT_EQ(memory.pinned_bytes(), 70);
    sampler.SetPipeline(nullptr);
  }
  EXPECT_TRUE(WaitFor([&] { return sampler.latest().device_used_bytes() == 0; }));
}

TEST(MemorySamplerTest, ActivationsAreNeverNegative) {
  FakePipeline pipeline;
  pipeline.used = 400;  // below the weights: read between two allocations
  MemorySampler sampler(absl::Hours(1));
  sampler.SetPipeline(&pipeline);
  ASSERT_TRUE(WaitFor([&] { return sampler.latest().device_used_bytes() == 400; }));
  EXPECT_EQ(sampler.latest().device_activations_bytes(), 0);
  sampler.SetPipeline(nullptr);
}

}  // namespace
}  // namespace dlo
