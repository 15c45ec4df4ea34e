// The streaming protocol, exhaustively: what the streamer really submits for six visits is recorded
// and every order in which its streams can get through it is tried.
//
// A state is how far each stream of each rank has got; a move is under way between its beginning
// and its end, so two that may overlap do. In no state may one move touch a buffer that another
// writes, a reader may find anything but the block that its visit is about, and only when all is
// done may nothing be able to go on. A gather begins rank by rank and ends once all have begun it.
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/block_streamer.h"
#include "offload/testing/recording_device.h"

namespace dlo {
namespace {

constexpr int64_t kVisits = 6;

class Group : public Communicator {
 public:
  explicit Group(int size) : Communicator("modelled", 0, size, absl::InfiniteDuration()) {}

 private:
  absl::Status Run(const CollectiveOp&) override { return absl::OkStatus(); }
  void Interrupt() override {}
  void Close() override {}
};

struct Case {
  const char* name;
  int slots = 2;
  int group = 1;
  bool staged = false;
  int ring = 3;  // blocks
};

// What the streamer submits for six visits.
RecordedProgram Record(const Case& c) {
  RecordingDevice device;
  Group group(c.group);
  static const std::byte kAnywhere{};
  std::vector<std::vector<HostBlock>> rings(1);
  for (int b = 0; b < c.ring; ++b) {
    HostBlock block{.layout =
                        BlockLayout::Of({{.name = "w", .shape = {1000}, .dtype = DType::kU8}})};
    if (c.staged) {
      block.pieces.push_back({&kAnywhere, 0, 1000});
    } else {
      block.bytes = &kAnywhere;
    }
    rings[0].push_back(std::move(block));
  }
  auto streamer = BlockStreamer::Create(device, std::move(rings), {.slots = c.slots},
                                        c.group > 1 ? &group : nullptr);
  EXPECT_TRUE(streamer.ok()) << streamer.status();
  VisitPlan plan({c.ring});
  plan.Add(0, kVisits / c.ring);
  EXPECT_TRUE((*streamer)->Start(plan).ok());
  for (int64_t v = 0; v < kVisits; ++v) {
    auto lease = (*streamer)->Acquire(0);
    EXPECT_TRUE(lease.ok()) << lease.status();
    device.Use(lease->data());
  }
  return device.program();
}

// How far each stream has got: two counts for each of its actions, begun and ended.
using State = std::vector<uint8_t>;

// All ranks together.
class Explorer {
 public:
  // `host_computes`: the host itself computes (the CPU device), so that a stream knows nothing of
  // what the host submits after a computing that still waits. Else everything is submitted at once.
  Explorer(std::vector<RecordedProgram> ranks, bool host_computes)
      : ranks_(std::move(ranks)), host_computes_(host_computes) {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      for (size_t s = 0; s < ranks_[r].streams.size(); ++s) {
        streams_.push_back({static_cast<int>(r), static_cast<int>(s)});
      }
    }
  }

  // The first thing that is wrong in any order, or nothing.
  std::string Run() {
    std::unordered_set<std::string> seen;
    std::deque<State> open = {State(streams_.size())};
    seen.insert(Key(open.front()));
    while (!open.empty()) {
      const State state = std::move(open.front());
      open.pop_front();
      if (std::string wrong = Check(state); !wrong.empty()) return wrong;
      bool moved = false;
      for (size_t i = 0; i < streams_.size(); ++i) {
        if (!CanGoOn(state, i)) continue;
        moved = true;
        State next = state;
        ++next[i];
        if (seen.insert(Key(next)).second) open.push_back(std::move(next));
      }
      if (!moved && !Done(state)) return "deadlock";
    }
    states_ = static_cast<int64_t>(seen.size());
    return "";
  }

  int64_t states() const { return states_; }

 private:
  struct Place {
    int rank;
    int stream;
  };

  static std::string Key(const State& state) { return std::string(state.begin(), state.end()); }

  const std::vector<RecordedAction>& Actions(size_t i) const {
    return ranks_[streams_[i].rank].streams[streams_[i].stream].actions;
  }
  bool Done(const State& state) const {
    for (size_t i = 0; i < streams_.size(); ++i) {
      if (state[i] != 2 * Actions(i).size()) return false;
    }
    return true;
  }
  // The action that stream i is in the middle of.
  const RecordedAction* UnderWay(const State& state, size_t i) const {
    return state[i] % 2 == 1 ? &Actions(i)[state[i] / 2] : nullptr;
  }
  // How often the event was reached: by the ends of the actions that record it.
  bool Reached(const State& state, int rank, const RecordedAction::Point& point) const {
    for (size_t i = 0; i < streams_.size(); ++i) {
      if (streams_[i].rank != rank) continue;
      for (size_t a = 0; a < state[i] / 2; ++a) {
        for (const RecordedAction::Point& reached : Actions(i)[a].reached) {
          if (reached.event == point.event && reached.times >= point.times) return true;
        }
      }
    }
    return false;
  }

  bool CanGoOn(const State& state, size_t i) const {
    const size_t at = state[i] / 2;
    if (at == Actions(i).size()) return false;
    const RecordedAction& action = Actions(i)[at];
    if (state[i] % 2 == 0) {
      if (host_computes_ && streams_[i].stream != 0) {
        const size_t compute = i - streams_[i].stream;
        if (state[compute] / 2 < action.after_compute) return false;
      }
      for (const RecordedAction::Point& point : action.waits) {
        if (!Reached(state, streams_[i].rank, point)) return false;
      }
      return true;
    }
    if (action.name != "gather") return true;
    for (size_t j = 0; j < streams_.size(); ++j) {
      if (streams_[j].stream == streams_[i].stream && state[j] < state[i]) return false;
    }
    return true;
  }

  std::string Check(const State& state) const {
    for (size_t i = 0; i < streams_.size(); ++i) {
      const RecordedAction* const a = UnderWay(state, i);
      if (a == nullptr) continue;
      for (size_t j = 0; j < streams_.size(); ++j) {
        const RecordedAction* const b = UnderWay(state, j);
        if (i == j || b == nullptr || streams_[i].rank != streams_[j].rank) continue;
        if (a->writes >= 0 && (a->writes == b->writes || a->writes == b->reads)) {
          return a->name + " writes what " + b->name + " uses";
        }
      }
      if (a->reads >= 0 && Content(state, streams_[i].rank, a->reads) != state[i] / 2) {
        return a->name + " reads another visit's bytes";
      }
    }
    return "";
  }

  // Which visit's bytes the buffer holds. Each buffer has one stream that writes to it, visit by
  // visit.
  int Content(const State& state, int rank, int buffer) const {
    int content = -1;
    for (size_t i = 0; i < streams_.size(); ++i) {
      if (streams_[i].rank != rank) continue;
      for (int a = 0; a < state[i] / 2; ++a) {
        if (Actions(i)[a].writes == buffer) content = a;
      }
    }
    return content;
  }

  const std::vector<RecordedProgram> ranks_;
  const bool host_computes_;
  std::vector<Place> streams_;
  int64_t states_ = 0;
};

class Protocol : public testing::TestWithParam<Case> {};

TEST_P(Protocol, HasNoOrderInWhichAnythingGoesWrong) {
  const RecordedProgram program = Record(GetParam());
  EXPECT_THAT(program.errors, testing::IsEmpty());
  for (const RecordedStream& stream : program.streams) {
    EXPECT_EQ(stream.actions.size(), static_cast<size_t>(kVisits)) << stream.name;
  }
  for (const bool host_computes : {false, true}) {
    Explorer explorer(std::vector<RecordedProgram>(GetParam().group, program), host_computes);
    EXPECT_EQ(explorer.Run(), "");
    // More than those of any single order.
    EXPECT_GT(explorer.states(),
              1 + 2 * kVisits * GetParam().group * static_cast<int64_t>(program.streams.size()));
  }
}

// Every single wait is needed: without it some order goes wrong, and the exploration finds it.
TEST_P(Protocol, WithoutAnyOneOfItsWaitsGoesWrong) {
  const RecordedProgram program = Record(GetParam());
  int removed = 0;
  for (size_t s = 0; s < program.streams.size(); ++s) {
    for (size_t a = 0; a < program.streams[s].actions.size(); ++a) {
      for (size_t w = 0; w < program.streams[s].actions[a].waits.size(); ++w) {
        RecordedProgram mutated = program;
        auto& waits = mutated.streams[s].actions[a].waits;
        waits.erase(waits.begin() + static_cast<int64_t>(w));
        std::vector<RecordedProgram> ranks(GetParam().group, program);
        ranks[0] = mutated;
        EXPECT_NE(Explorer(ranks, false).Run(), "")
            << program.streams[s].name << ", visit " << a << ", wait " << w;
        ++removed;
      }
    }
  }
  // compute waits for each delivery; deliveries from visit `slots` on for a release; with a fill,
  // deliveries wait for it, and fills from visit 2 on for a delivery.
  const int64_t slots = GetParam().slots;
  const bool fills = GetParam().staged || GetParam().group > 1;
  EXPECT_EQ(removed, kVisits + kVisits - slots + (fills ? kVisits + kVisits - 2 : 0));
}

// Nor may it wait for more than it can get: a wait for a release that comes only later.
TEST(ProtocolExplorer, SeesADeadlock) {
  RecordedProgram program = Record({.name = "direct"});
  RecordedAction& delivery = program.streams[1].actions[2];
  ASSERT_EQ(delivery.waits.size(), 1u);
  ++delivery.waits[0].times;
  EXPECT_EQ(Explorer({program}, false).Run(), "deadlock");
}

INSTANTIATE_TEST_SUITE_P(Transfers, Protocol,
                         testing::Values(Case{.name = "direct"},
                                         Case{.name = "direct3", .slots = 3},
                                         Case{.name = "one_block", .ring = 1},
                                         Case{.name = "staged", .staged = true},
                                         Case{.name = "staged3", .slots = 3, .staged = true},
                                         Case{.name = "gather2", .group = 2},
                                         Case{.name = "gather2_slots3", .slots = 3, .group = 2}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace dlo
