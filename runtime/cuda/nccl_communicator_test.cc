// Ranks are threads of this process, each with a device of its own; skipped where there are none.
#include "runtime/cuda/nccl_communicator.h"

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/communicator_testing.h"

namespace dlo {
namespace {

using ::testing::HasSubstr;

class LocalStore : public RendezvousStore {
 public:
  absl::Status Set(const std::string& key, const std::string& value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> Get(const std::string& key, absl::Time deadline) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_until(lock, absl::ToChronoTime(deadline),
                             [&] { return values_.contains(key); })) {
      return absl::DeadlineExceededError(absl::StrCat("no ", key));
    }
    return values_[key];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

int DeviceCount() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

void RunRanks(int size, absl::Duration operation_timeout,
              const std::function<void(std::unique_ptr<Communicator>)>& body) {
  LocalStore store;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      auto factory = OpenNcclFactory(store, {.device = rank, .prefix = "test"});
      ASSERT_TRUE(factory.ok()) << factory.status();
      auto communicator = (*factory)->Create({.name = "g",
                                              .rank = rank,
                                              .size = size,
                                              .setup_timeout = absl::Seconds(100),
                                              .operation_timeout = operation_timeout,
                                              .spare_compute = true});
      ASSERT_TRUE(communicator.ok()) << communicator.status();
      body(*std::move(communicator));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class NcclCommunicator : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (DeviceCount() < GetParam()) GTEST_SKIP() << "needs " << GetParam() << " GPUs";
  }
};
INSTANTIATE_TEST_SUITE_P(WorldSizes, NcclCommunicator, testing::Values(1, 2, 3, 4));

TEST_P(NcclCommunicator, DoesEveryOperationAtEverySize) {
  RunRanks(GetParam(), absl::Seconds(100), [](std::unique_ptr<Communicator> group) {
    // Pinned host memory, which the device and this test both reach.
    const std::string problems = CheckCollectives(*group, [](int64_t bytes) {
      void* data = nullptr;
      EXPECT_EQ(cudaHostAlloc(&data, bytes, cudaHostAllocDefault), cudaSuccess);
      return std::shared_ptr<std::byte>(static_cast<std::byte*>(data),
                                        [](std::byte* released) { cudaFreeHost(released); });
    });
    EXPECT_EQ(problems, "");
  });
}

TEST(NcclFaults, ARankThatStaysAwayEndsTheOperationAtTheDeadline) {
  if (DeviceCount() < 2) GTEST_SKIP() << "needs 2 GPUs";
  RunRanks(2, absl::Seconds(2), [](std::unique_ptr<Communicator> group) {
    ASSERT_TRUE(group->Barrier().ok());
    if (group->rank() == 1) return;
    const absl::Status status = group->Barrier();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(status.message(), HasSubstr("Barrier #2"));
    EXPECT_EQ(group->Barrier().code(), absl::StatusCode::kFailedPrecondition);
  });
}

TEST(NcclFactory, ADeviceThatIsNotThereIsNamed) {
  LocalStore store;
  auto factory = OpenNcclFactory(store, {.device = 4096});
  EXPECT_EQ(factory.status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace dlo
