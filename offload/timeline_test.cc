#include "offload/timeline.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "offload/block_streamer.h"
#include "offload/testing/host_model.h"
#include "runtime/cpu/cpu_device.h"

namespace dlo {
namespace {

using json = nlohmann::json;

// Events of the named track, in the order of the file.
std::vector<json> Track(const json& timeline, const std::string& name) {
  int tid = -1;
  for (const json& event : timeline["traceEvents"]) {
    if (event["ph"] == "M" && event["args"]["name"] == name) tid = event["tid"];
  }
  std::vector<json> events;
  for (const json& event : timeline["traceEvents"]) {
    if (event["ph"] == "X" && event["tid"] == tid) events.push_back(event);
  }
  return events;
}

double End(const json& event) { return event["ts"].get<double>() + event["dur"].get<double>(); }

TEST(Timeline, WithoutStreamingHasStagesAndSteps) {
  Timeline timeline{.rank = 3};
  timeline.stages = {{"text", absl::ZeroDuration(), absl::Milliseconds(2)},
                     {"denoise", absl::Milliseconds(2), absl::Milliseconds(9)}};
  timeline.steps = {{"step 1", absl::Milliseconds(3), absl::Microseconds(5500)}};
  const json parsed = json::parse(TimelineJson(timeline));
  EXPECT_EQ(parsed["otherData"]["rank"], 3);
  const std::vector<json> stages = Track(parsed, "stages");
  ASSERT_EQ(stages.size(), 3u);
  EXPECT_EQ(stages[1]["name"], "denoise");
  EXPECT_EQ(stages[1]["ts"], 2000.0);
  EXPECT_EQ(stages[1]["dur"], 7000.0);
  EXPECT_EQ(stages[2]["ts"], 3000.0);
  EXPECT_EQ(stages[2]["dur"], 2500.0);
  EXPECT_TRUE(Track(parsed, "compute").empty());
}

// Real streams: every visit is on every track, in order, one after the other on a track, moves
// before their computing; and while a block computes the next one is copied.
TEST(Timeline, ShowsEveryVisitAndThatCopiesOverlapComputing) {
  for (const bool staged : {false, true}) {
    const HostModel model({{40, 700, 3}, {900, 900}});
    VisitPlan plan = model.Plan();
    plan.Add(0, 4);
    plan.Add(1, 3);
    // The next visit's copy has begun before this visit's computing ends, which the test waits for.
    std::vector<absl::Notification> began(plan.num_visits());
    int64_t deliveries = 0;
    auto device = MakeCpuDevice(0, {.moves = {.before = [&](const CpuMove& move) {
                                      if (move.kind == CpuMove::Kind::kCopy) {
                                        began[deliveries++].Notify();
                                      }
                                      return absl::OkStatus();
                                    }}});
    auto streamer = *BlockStreamer::Create(*device, staged ? model.Staged() : model.Whole(),
                                           {.slots = 2}, nullptr);
    VisitLog log(100);
    ASSERT_TRUE(streamer->Start(plan, &log).ok());
    for (auto c = plan.begin(); !c.done(); c.Next()) {
      auto lease = streamer->Acquire(c.ring());
      ASSERT_TRUE(lease.ok());
      const int64_t next = c.visit() + 1;
      if (next < plan.num_visits()) {
        ASSERT_TRUE(began[next].WaitForNotificationWithTimeout(absl::Seconds(60)));
      }
    }
    streamer->stats();

    Timeline timeline{.visits = &log,
                      .ring_names = {"text_encoder", "transformer"},
                      .fill_kind = streamer->fill_kind(),
                      .deliver_kind = streamer->deliver_kind()};
    const json parsed = json::parse(TimelineJson(timeline));
    EXPECT_EQ(parsed["otherData"]["visits_dropped"], 0);
    std::map<std::string, std::vector<json>> tracks;
    for (const char* name : {"compute", "copy", "pack"}) {
      for (const json& event : Track(parsed, name)) {
        std::vector<json>& track = tracks[name];
        if (!track.empty()) {
          EXPECT_GE(event["ts"].get<double>(), End(track.back()) - 0.002) << name;
        }
        if (event["name"] != "wait") track.push_back(event);
      }
    }
    EXPECT_EQ(tracks.count("pack"), staged ? 1u : 0u);
    if (!staged) tracks.erase("pack");
    for (const auto& [name, track] : tracks) {
      ASSERT_EQ(track.size(), static_cast<size_t>(plan.num_visits())) << name;
      auto c = plan.begin();
      for (const json& event : track) {
        EXPECT_EQ(event["args"]["visit"], c.visit());
        EXPECT_EQ(event["name"],
                  (c.ring() == 0 ? "text_encoder " : "transformer ") + std::to_string(c.block()));
        c.Next();
      }
    }
    for (int64_t v = 0; v < plan.num_visits(); ++v) {
      const json& compute = tracks["compute"][v];
      EXPECT_LE(End(tracks["copy"][v]), compute["ts"].get<double>() + 0.002);
      if (staged) {
        EXPECT_LE(End(tracks["pack"][v]), tracks["copy"][v]["ts"].get<double>() + 0.002);
      }
      if (v > 0) {
        EXPECT_LT(tracks["copy"][v]["ts"].get<double>(), End(tracks["compute"][v - 1]));
      }
    }
  }
}

// A long request: the newest visits that fit, and how many did not.
TEST(Timeline, IsBoundedByTheLog) {
  VisitLog log(10);
  for (int64_t v = 0; v < 1000; ++v) log.Add({.visit = v});
  const std::string text =
      TimelineJson({.visits = &log, .ring_names = {"transformer"}, .deliver_kind = "copy"});
  const json parsed = json::parse(text);
  EXPECT_EQ(parsed["otherData"]["visits_dropped"], 990);
  EXPECT_EQ(Track(parsed, "compute").size(), 10u);
  EXPECT_EQ(Track(parsed, "compute")[0]["args"]["visit"], 990);
}

}  // namespace
}  // namespace dlo
