#include "offload/startup_agreement.h"

#include <functional>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/cpu/thread_communicator.h"

namespace dlo {
namespace {

using testing::HasSubstr;

// What `agree` tells each of `size` ranks.
std::vector<absl::Status> OnRanks(int size,
                                  const std::function<absl::Status(Communicator&, int)>& agree) {
  ThreadWorld world;
  std::vector<absl::Status> told(size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      auto group = world.factory().Create({.name = "weights/0", .rank = rank, .size = size});
      told[rank] = group.ok() ? agree(**group, rank) : group.status();
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return told;
}

TEST(AgreeOnSettings, EqualOnesPass) {
  for (const absl::Status& status : OnRanks(3, [](Communicator& group, int) {
         return AgreeOnSettings(group, {{"build", "1"}, {"offload.slots", "2"}});
       })) {
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(AgreeOnSettings, EveryDifferenceIsToldToEveryRank) {
  for (const absl::Status& status : OnRanks(3, [](Communicator& group, int rank) {
         std::vector<Setting> settings = {{"build", "1"}, {"offload.slots", "2"}};
         if (rank == 1) settings[0].value = "a much longer one";
         if (rank == 2) settings.pop_back();
         return AgreeOnSettings(group, settings);
       })) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(status.message(),
                HasSubstr("rank 1 has build \"a much longer one\" where rank 0 has \"1\""));
    EXPECT_THAT(status.message(), HasSubstr("rank 2 has offload.slots nothing where rank 0 has"));
  }
}

TEST(AgreeOnHostMemory, NeedsAddUpPerHostAgainstItsSmallestLimit) {
  struct Case {
    int64_t limit_bytes;
    bool two_hosts;
    bool fits;
  };
  for (const Case& c : {Case{0, false, true}, Case{400, false, true}, Case{399, false, false},
                        Case{200, true, true}, Case{199, true, false}}) {
    for (const absl::Status& status : OnRanks(4, [&](Communicator& group, int rank) {
           return AgreeOnHostMemory(group, {.need_bytes = 100,
                                            .limit_bytes = rank == 1 ? c.limit_bytes : 0,
                                            .limit_name = "offload.host_memory_limit",
                                            .host = c.two_hosts && rank >= 2 ? "b" : "a"});
         })) {
      EXPECT_EQ(status.ok(), c.fits) << status;
      if (!status.ok()) {
        EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
        EXPECT_THAT(status.message(), HasSubstr("offload.host_memory_limit"));
      }
    }
  }
}

TEST(CheckHostMemory, CountsEveryProcess) {
  const HostMemoryNeed need = {.need_bytes = 100, .limit_bytes = 399, .limit_name = "limit"};
  EXPECT_TRUE(CheckHostMemory(need, 3).ok());
  EXPECT_EQ(CheckHostMemory(need, 4).code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace dlo
