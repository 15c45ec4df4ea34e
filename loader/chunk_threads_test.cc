#include "loader/chunk_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/barrier.h"

namespace dlo {
namespace {

TEST(RunChunksTest, RunsEachChunkOnceWithAnyNumberOfThreads) {
  for (int threads : {0, 1, 2, 7}) {
    for (int64_t chunks : {0, 1, 3, 1000}) {
      std::vector<std::atomic<int>> runs(chunks);
      const auto used = RunChunks(chunks, threads, "testing", [&](int64_t i) {
        ++runs[i];
        return absl::OkStatus();
      });
      ASSERT_TRUE(used.ok());
      for (const std::atomic<int>& count : runs) ASSERT_EQ(count, 1);
      if (threads > 0) {
        EXPECT_EQ(*used, std::max<int64_t>(1, std::min<int64_t>(threads, chunks)));
      }
    }
  }
}

TEST(RunChunksTest, ThreadsRunAtTheSameTime) {
  absl::Barrier all_there(4);
  EXPECT_TRUE(RunChunks(4, 4, "testing", [&](int64_t) {
                all_there.Block();
                return absl::OkStatus();
              }).ok());
}

TEST(RunChunksTest, AfterAnErrorNoChunkBegins) {
  for (int threads : {1, 4}) {
    std::atomic<int> runs = 0;
    const auto used = RunChunks(1000000, threads, "testing", [&](int64_t i) {
      ++runs;
      return i == 10 ? absl::DataLossError("ten") : absl::OkStatus();
    });
    EXPECT_EQ(used.status(), absl::DataLossError("ten"));
    EXPECT_GE(runs, 11);
    EXPECT_LT(runs, 1000000);
  }
}

TEST(RunChunksTest, OfSeveralErrorsTheFirstInTheOrderOfTheChunksIsGiven) {
  for (int round = 0; round < 200; ++round) {
    std::atomic<bool> later_fails = false;
    const auto used = RunChunks(2, 2, "testing", [&](int64_t i) {
      if (i == 0) {
        later_fails.wait(false);
      } else {
        later_fails = true;
        later_fails.notify_all();
      }
      return absl::InternalError(absl::StrCat(i));
    });
    ASSERT_EQ(used.status(), absl::InternalError("0"));
  }
}

// Each chunk waits for the one before to end, and some of those fail.
TEST(RunChunksTest, AChunkMayWaitForEarlierOnesWhateverFails) {
  constexpr int64_t kChunks = 200;
  for (int64_t failing : {int64_t{-1}, int64_t{0}, int64_t{57}}) {
    std::vector<std::atomic<int>> ended(kChunks);
    const auto used = RunChunks(kChunks, 5, "testing", [&](int64_t i) {
      if (i > 0) ended[i - 1].wait(0);
      ended[i] = 1;
      ended[i].notify_all();
      return i == failing ? absl::InternalError(absl::StrCat(i)) : absl::OkStatus();
    });
    EXPECT_EQ(used.ok(), failing < 0) << used.status();
  }
}

}  // namespace
}  // namespace dlo
