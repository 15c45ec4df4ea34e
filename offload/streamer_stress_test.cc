// The protocol under random delays: whatever the moves, the gathers and the computing take, a block
// is whole from its Acquire to the end of its lease.
//
// Memory that nobody may read is poisoned: a slot before its delivery and after its release, an
// intake buffer before its fill and after its delivery. A move that comes too early or too late
// shows in a block's contents, and to ThreadSanitizer as a race.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "offload/block_streamer.h"
#include "offload/testing/host_model.h"
#include "runtime/cpu/cpu_device.h"
#include "runtime/cpu/thread_communicator.h"

namespace dlo {
namespace {

constexpr int kPoison = 0xDB;

// Visits of all plans together, each checked on every rank of its group. More on request:
// STREAMER_STRESS_VISITS=100000.
int64_t VisitsWanted() {
  const char* wanted = std::getenv("STREAMER_STRESS_VISITS");
  return wanted == nullptr ? 10000 : std::atoll(wanted);
}

// Mostly nothing, sometimes a turn for another thread, rarely so long that others get far ahead.
class Delays {
 public:
  explicit Delays(uint32_t seed) : seed_(seed) {}

  void Take() {
    // A generator for each thread: a shared one would order the threads that it disturbs.
    thread_local std::minstd_rand random(seed_ + next_thread_++);
    switch (random() % 16) {
      case 0:
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 120));
        break;
      case 1:
      case 2:
      case 3:
      case 4: {
        const int turns = static_cast<int>(random() % 400);
        for (int i = 0; i < turns; ++i) std::atomic_signal_fence(std::memory_order_seq_cst);
        break;
      }
      case 5:
      case 6:
        std::this_thread::yield();
        break;
      default:
        break;
    }
  }

 private:
  const uint32_t seed_;
  static inline std::atomic<uint32_t> next_thread_ = 0;
};

// What the streamer's buffers hold outside their moves is poison.
CpuDeviceHooks PoisoningHooks(Delays& delays, bool staged, int group) {
  const auto before = [&delays, staged, group](const CpuMove& move) {
    delays.Take();
    // Into a slot, whose last reader has released it.
    const bool delivery = move.kind == CpuMove::Kind::kAllGather ||
                          (move.kind == CpuMove::Kind::kCopy && (staged || group == 1));
    if (delivery) {
      std::memset(move.to, kPoison,
                  move.bytes * (move.kind == CpuMove::Kind::kAllGather ? group : 1));
    }
    delays.Take();
    return absl::OkStatus();
  };
  const auto after = [&delays, staged](const CpuMove& move) {
    delays.Take();
    // Out of an intake buffer, for the last time. It is ordinary memory of the test's own device.
    const bool delivered =
        move.kind == CpuMove::Kind::kAllGather || (staged && move.kind == CpuMove::Kind::kCopy);
    if (delivered) std::memset(const_cast<std::byte*>(move.from), kPoison, move.bytes);
    delays.Take();
    return absl::OkStatus();
  };
  return {.moves = {.before = before, .after = after}};
}

struct Trial {
  std::vector<std::vector<int64_t>> words;
  std::vector<VisitPlan::Run> runs;
  int slots = 2;
  int group = 1;
  bool staged = false;

  std::string text() const {
    std::string text = absl::StrCat("slots ", slots, " group ", group, staged ? " staged" : "");
    for (const auto& ring : words) absl::StrAppend(&text, " ring of ", ring.size());
    return text;
  }
};

Trial Draw(std::mt19937& random) {
  const auto pick = [&random](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  Trial trial;
  trial.slots = pick(2, 4);
  trial.group = pick(1, 4);
  trial.staged = trial.group == 1 && pick(0, 1) == 1;
  trial.words.resize(pick(1, 3));
  for (auto& ring : trial.words) {
    // Odd and even counts, a ring of one; blocks of up to 32 times another's size.
    ring.resize(pick(0, 3) == 0 ? 1 : pick(2, 7));
    for (int64_t& words : ring) words = pick(1, 2000);
  }
  const int runs = pick(1, 4);
  for (int i = 0; i < runs; ++i) {
    trial.runs.push_back({pick(0, static_cast<int>(trial.words.size()) - 1), pick(1, 12)});
  }
  return trial;
}

// One rank's walk. Returns what was wrong, or nothing.
std::string Walk(const Trial& trial, const HostModel& model, const VisitPlan& plan,
                 Communicator* communicator, int rank, Delays& delays) {
  const HostModel::Shards shards =
      communicator == nullptr ? HostModel::Shards{} : model.Shard(rank, trial.group);
  const auto rings = communicator != nullptr ? shards.rings
                     : trial.staged          ? model.Staged()
                                             : model.Whole();
  const auto device = MakeCpuDevice(0, PoisoningHooks(delays, trial.staged, trial.group));
  auto streamer = BlockStreamer::Create(*device, rings, {.slots = trial.slots}, communicator);
  if (!streamer.ok()) return std::string(streamer.status().message());
  if (absl::Status started = (*streamer)->Start(plan); !started.ok()) {
    return std::string(started.message());
  }
  for (auto c = plan.begin(); !c.done(); c.Next()) {
    delays.Take();
    auto lease = (*streamer)->Acquire(c.ring());
    if (!lease.ok()) return std::string(lease.status().message());
    if (lease->block() != c.block()) return absl::StrCat("another block at visit ", c.visit());
    if (!HostModel::Matches(*lease, c.ring())) return absl::StrCat("early at visit ", c.visit());
    delays.Take();  // computing
    if (!HostModel::Matches(*lease, c.ring())) return absl::StrCat("late at visit ", c.visit());
    std::memset(lease->data(), kPoison, lease->layout().total_bytes());
  }
  return "";
}

TEST(StreamerStress, BlocksAreWholeWhateverTakesHowLong) {
  const int64_t wanted = VisitsWanted();
  int64_t visits = 0;
  for (uint32_t seed = 1; visits < wanted; ++seed) {
    std::mt19937 random(seed);
    const Trial trial = Draw(random);
    SCOPED_TRACE(absl::StrCat("seed ", seed, ": ", trial.text()));
    const HostModel model(trial.words);
    VisitPlan plan = model.Plan();
    for (const VisitPlan::Run& run : trial.runs) plan.Add(run.ring, run.passes);
    visits += plan.num_visits();

    Delays delays(seed);
    std::vector<std::string> wrong(trial.group);
    if (trial.group == 1) {
      wrong[0] = Walk(trial, model, plan, nullptr, 0, delays);
    } else {
      ThreadWorld world;
      std::vector<std::thread> ranks;
      for (int rank = 0; rank < trial.group; ++rank) {
        ranks.emplace_back([&, rank] {
          auto communicator =
              world.factory().Create({.name = "weights", .rank = rank, .size = trial.group});
          wrong[rank] = communicator.ok()
                            ? Walk(trial, model, plan, communicator->get(), rank, delays)
                            : std::string(communicator.status().message());
        });
      }
      for (std::thread& rank : ranks) rank.join();
    }
    for (int rank = 0; rank < trial.group; ++rank) ASSERT_EQ(wrong[rank], "") << "rank " << rank;
  }
}

}  // namespace
}  // namespace dlo
