#include "runtime/pinned_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dlo {
namespace {

// A driver that pins by locking the pages, and keeps the books.
class Driver {
 public:
  PinCalls calls() {
    return {.pin = [this](std::byte* data, int64_t bytes) -> absl::Status {
              if (num_pins_++ == fail_at_) return absl::ResourceExhaustedError("no more");
              EXPECT_EQ(mlock(data, bytes), 0);
              pinned_[data] = bytes;
              order_.push_back(data);
              return absl::OkStatus();
            },
            .unpin = [this](std::byte* data) -> absl::Status {
              if (data == stuck_) return absl::InternalError("busy");
              EXPECT_EQ(pinned_.count(data), 1u);
              EXPECT_EQ(munlock(data, pinned_[data]), 0);
              pinned_.erase(data);
              EXPECT_EQ(order_.back(), data) << "not the last one first";
              order_.pop_back();
              return absl::OkStatus();
            }};
  }

  int num_pins_ = 0;
  int fail_at_ = -1;
  std::byte* stuck_ = nullptr;
  std::map<std::byte*, int64_t> pinned_;
  std::vector<std::byte*> order_;
};

bool IsMapped(std::byte* page) {
  unsigned char resident = 0;
  return mincore(page, 1, &resident) == 0;
}

const int64_t kPage = sysconf(_SC_PAGESIZE);

TEST(PinnedMemory, PinsWholePagesOfTheExactSizeInPieces) {
  Driver driver;
  std::byte* data = nullptr;
  {
    auto memory = PinnedMemory::Allocate(4 * kPage + 1, driver.calls(), 2 * kPage);
    ASSERT_TRUE(memory.ok()) << memory.status();
    data = (*memory)->data();
    EXPECT_EQ((*memory)->bytes(), 4 * kPage + 1);
    EXPECT_THAT(driver.pinned_, testing::ElementsAre(testing::Pair(data, 2 * kPage),
                                                     testing::Pair(data + 2 * kPage, 2 * kPage),
                                                     testing::Pair(data + 4 * kPage, kPage)));
    (*memory)->data()[4 * kPage] = std::byte{1};
  }
  EXPECT_TRUE(driver.pinned_.empty());
  EXPECT_FALSE(IsMapped(data));
}

TEST(PinnedMemory, APieceThatCannotBePinnedLeavesNothingBehind) {
  for (int fail_at : {0, 1, 2}) {
    Driver driver;
    driver.fail_at_ = fail_at;
    const auto memory = PinnedMemory::Allocate(5 * kPage, driver.calls(), 2 * kPage);
    EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(memory.status().message()),
                testing::AllOf(testing::HasSubstr(std::to_string(5 * kPage)),
                               testing::HasSubstr(std::to_string(fail_at * 2 * kPage) + " are"),
                               testing::HasSubstr("no more")));
    EXPECT_TRUE(driver.pinned_.empty());
  }
}

TEST(PinnedMemory, WhatStaysPinnedStaysMapped) {
  Driver driver;
  std::byte* data = nullptr;
  {
    auto memory = PinnedMemory::Allocate(3 * kPage, driver.calls(), kPage);
    ASSERT_TRUE(memory.ok()) << memory.status();
    data = (*memory)->data();
    driver.stuck_ = data;
  }
  EXPECT_EQ(driver.pinned_.size(), 1u);
  EXPECT_TRUE(IsMapped(data));
  munmap(data, 3 * kPage);
}

TEST(PinnedMemory, AnEmptyBufferIsPinnedToo) {
  Driver driver;
  auto memory = PinnedMemory::Allocate(0, driver.calls());
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_NE((*memory)->data(), nullptr);
  EXPECT_EQ((*memory)->bytes(), 0);
}

TEST(PinnedMemory, TooLargeABufferIsAnError) {
  Driver driver;
  EXPECT_EQ(PinnedMemory::Allocate(int64_t{1} << 60, driver.calls()).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(driver.num_pins_, 0);
}

}  // namespace
}  // namespace dlo
