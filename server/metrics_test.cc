#include "server/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/cgroup_memory.h"
#include "proto/convert.h"
#include "server/compatibility_key.h"
#include "server/metrics_server.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// Metrics on a registry of the test's own.
class MetricsTest : public testing::Test {
 protected:
  // Of a series as the text format names it: `name{label="value"}`.
  double Value(const std::string& series) const {
    std::istringstream lines(Text());
    for (std::string line; std::getline(lines, line);) {
      absl::string_view rest = line;
      if (absl::ConsumePrefix(&rest, series + " ")) return std::stod(std::string(rest));
    }
    ADD_FAILURE() << "no series " << series;
    return -1;
  }

  std::string Text() const { return prometheus::TextSerializer().Serialize(registry_->Collect()); }

  std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  ServerMetrics metrics_{2, registry_};
};

// Each family as docs/reference.md has it: "name | type | labels".
std::set<std::string> Families(const ServerMetrics& metrics) {
  static const std::map<prometheus::MetricType, std::string> types = {
      {prometheus::MetricType::Counter, "counter"},
      {prometheus::MetricType::Gauge, "gauge"},
      {prometheus::MetricType::Histogram, "histogram"}};
  std::set<std::string> families;
  for (const auto& collectable : metrics.collectables()) {
    for (const prometheus::MetricFamily& family : collectable->Collect()) {
      std::vector<std::string> labels;
      for (const auto& label : family.metric.at(0).label) {
        labels.push_back(absl::StrCat("`", label.name, "`"));
      }
      families.insert(absl::StrCat("`", family.name, "` | ", types.at(family.type), " | ",
                                   absl::StrJoin(labels, ", ")));
    }
  }
  return families;
}

TEST_F(MetricsTest, TheReferenceListsEveryFamilyWithItsTypeAndLabelsAndNoOther) {
  std::ifstream page(fs::path(DLO_SOURCE_DIR) / "docs/reference.md");
  std::set<std::string> listed;
  for (std::string line; std::getline(page, line);) {
    if (!absl::StartsWith(line, "| `dlo_")) continue;
    const std::vector<std::string> cells = absl::StrSplit(line, '|');
    ASSERT_GE(cells.size(), 5u) << line;
    const auto cell = [&](int i) { return std::string(absl::StripAsciiWhitespace(cells[i])); };
    listed.insert(absl::StrCat(cell(1), " | ", cell(2), " | ", cell(3)));
  }
  EXPECT_EQ(listed, Families(metrics_));
}

TEST_F(MetricsTest, EverySeriesIsThereBeforeAnythingHappens) {
  const std::string before = Text();
  const auto names = [](const std::string& text) {
    std::set<std::string> series;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      if (!absl::StartsWith(line, "#")) series.insert(line.substr(0, line.rfind(' ')));
    }
    return series;
  };
  metrics_.SetServing(true);
  metrics_.requests().Refused("a reason that nobody knows");
  metrics_.requests().Started(absl::Seconds(1));
  metrics_.requests().StepDone(absl::Seconds(1));
  for (const v1::JobState state :
       {v1::JOB_STATE_SUCCEEDED, v1::JOB_STATE_FAILED, v1::JOB_STATE_CANCELLED}) {
    v1::Job job;
    job.set_state(state);
    metrics_.requests().Ended(job);
  }
  metrics_.waves().Started({.key = "a", .deferred_keys = {"b"}});
  metrics_.waves().LateReply();
  metrics_.workers().Lost("a reason that nobody knows");
  metrics_.rank(1).SetState(RankState::kEnding);
  metrics_.rank(1).SetMemory({});
  metrics_.rank(1).AddUsage({});
  v1::StartupRecord startup;
  startup.set_outcome("an outcome that nobody knows");
  for (const char* word : {"of no set", "lookup"}) {
    v1::StartupAttempt& attempt = *startup.add_attempts();
    attempt.set_stage(word);
    attempt.set_result(word);
    attempt.set_reason(word);
    startup.add_phases()->set_phase(word);
    startup.add_host_weights()->set_backing(word);
  }
  startup.mutable_publication()->set_outcome("of no set");
  metrics_.workers().Startup(1, startup);
  EXPECT_EQ(names(Text()), names(before));
  EXPECT_NE(Text(), before);
}

TEST_F(MetricsTest, RefusalsCountByReasonAndUnknownOnesAsOther) {
  metrics_.requests().Refused("INVALID_ARGUMENT");
  metrics_.requests().Refused("RESOURCE_EXHAUSTED");
  metrics_.requests().Refused("OF_NO_KNOWN_KIND");
  EXPECT_EQ(Value("dlo_requests_total{outcome=\"refused\"}"), 3);
  EXPECT_EQ(Value("dlo_request_refusals_total{reason=\"INVALID_ARGUMENT\"}"), 1);
  EXPECT_EQ(Value("dlo_request_refusals_total{reason=\"QUEUE_FULL\"}"), 1);
  EXPECT_EQ(Value("dlo_request_refusals_total{reason=\"other\"}"), 1);
}

TEST_F(MetricsTest, AJobThatSucceededTellsItsTimes) {
  v1::Job job;
  job.set_state(v1::JOB_STATE_SUCCEEDED);
  *job.mutable_create_time() = ToProto(absl::FromUnixSeconds(100));
  *job.mutable_end_time() = ToProto(absl::FromUnixSeconds(130));
  v1::StageTimes* times = job.mutable_result()->mutable_times();
  *times->mutable_text() = ToProto(absl::Seconds(2));
  *times->mutable_denoise() = ToProto(absl::Seconds(20));
  *times->mutable_decode() = ToProto(absl::Seconds(4));
  *times->mutable_encode_tail() = ToProto(absl::Milliseconds(500));
  metrics_.requests().Ended(job);
  EXPECT_EQ(Value("dlo_requests_total{outcome=\"succeeded\"}"), 1);
  EXPECT_EQ(Value("dlo_request_duration_seconds_sum"), 30);
  const std::map<std::string, double> expected = {
      {"text", 2}, {"denoise", 20}, {"decode", 4}, {"encode_tail", 0.5}};
  for (const auto& [stage, seconds] : expected) {
    const std::string label = absl::StrCat("{stage=\"", stage, "\"}");
    EXPECT_EQ(Value("dlo_request_stage_duration_seconds_sum" + label), seconds);
    EXPECT_EQ(Value("dlo_request_stage_duration_seconds_count" + label), 1);
  }
  EXPECT_EQ(Value("dlo_request_duration_seconds_bucket{le=\"20\"}"), 0);
  EXPECT_EQ(Value("dlo_request_duration_seconds_bucket{le=\"50\"}"), 1);
}

TEST_F(MetricsTest, JobsThatFailedOrWereCancelledTellNoTimes) {
  v1::Job job;
  job.set_state(v1::JOB_STATE_FAILED);
  job.mutable_failure()->set_reason("RANK_LOST");
  metrics_.requests().Ended(job);
  job.mutable_failure()->set_reason("SOMETHING_NEW");
  metrics_.requests().Ended(job);
  job.set_state(v1::JOB_STATE_CANCELLED);
  metrics_.requests().Ended(job);
  EXPECT_EQ(Value("dlo_requests_total{outcome=\"failed\"}"), 2);
  EXPECT_EQ(Value("dlo_requests_total{outcome=\"cancelled\"}"), 1);
  EXPECT_EQ(Value("dlo_request_failures_total{reason=\"RANK_LOST\"}"), 1);
  EXPECT_EQ(Value("dlo_request_failures_total{reason=\"other\"}"), 1);
  EXPECT_EQ(Value("dlo_request_duration_seconds_count"), 0);
}

TEST_F(MetricsTest, AWaveTellsSizeFillWaitAndWhichFieldsKeptOthersOut) {
  const auto key = [](int width, int steps) {
    VideoSettings settings;
    settings.width = width;
    settings.num_inference_steps = steps;
    return CompatibilityKey(settings, v1::OUTPUT_FORMAT_MP4, nlohmann::json::object()).value();
  };
  metrics_.waves().Started({.requests = 3,
                            .capacity = 4,
                            .wait = absl::Milliseconds(250),
                            .key = key(16, 4),
                            .deferred_keys = {key(32, 4), key(32, 5)}});
  EXPECT_EQ(Value("dlo_wave_requests_sum"), 3);
  EXPECT_EQ(Value("dlo_wave_fill_ratio_sum"), 0.75);
  EXPECT_EQ(Value("dlo_wave_wait_seconds_sum"), 0.25);
  EXPECT_EQ(Value("dlo_wave_deferrals_total{field=\"width\"}"), 2);
  EXPECT_EQ(Value("dlo_wave_deferrals_total{field=\"steps\"}"), 1);
  EXPECT_EQ(Value("dlo_wave_deferrals_total{field=\"fps\"}"), 0);
  metrics_.waves().Started({.key = "a digest", .deferred_keys = {"another"}});
  EXPECT_EQ(Value("dlo_wave_deferrals_total{field=\"schedule\"}"), 1);
}

TEST_F(MetricsTest, AStartTellsWhereItsWeightsCameFromAndWhatWasTried) {
  v1::StartupRecord record;
  record.set_outcome("canonical-fallback");
  v1::StartupAttempt& attempt = *record.add_attempts();
  attempt.set_stage("lookup");
  attempt.set_result("miss");
  attempt.set_reason("miss");
  attempt.set_message("/a/path that is no label");
  v1::StartupPhase& phase = *record.add_phases();
  phase.set_phase("load");
  *phase.mutable_time() = ToProto(absl::Seconds(3));
  *record.mutable_duration() = ToProto(absl::Seconds(4));
  record.set_read_bytes(100);
  record.set_mapped_bytes(200);
  for (const char* backing : {"memory", "memory", "artifact"}) {
    record.add_host_weights()->set_backing(backing);
  }
  record.mutable_publication()->set_outcome("published");
  metrics_.workers().Startup(1, record);
  EXPECT_EQ(Value("dlo_startups_total{outcome=\"canonical-fallback\"}"), 1);
  EXPECT_EQ(Value("dlo_startups_total{outcome=\"local-hit\"}"), 0);
  EXPECT_EQ(Value("dlo_startup_attempts_total{result=\"miss\",stage=\"lookup\"}"), 1);
  EXPECT_EQ(Value("dlo_startup_reasons_total{reason=\"miss\"}"), 1);
  EXPECT_EQ(Value("dlo_publications_total{outcome=\"published\"}"), 1);
  EXPECT_EQ(Value("dlo_rank_startup_seconds{phase=\"load\",rank=\"1\"}"), 3);
  EXPECT_EQ(Value("dlo_rank_startup_seconds{phase=\"all\",rank=\"1\"}"), 4);
  EXPECT_EQ(Value("dlo_rank_startup_bytes{kind=\"read\",rank=\"1\"}"), 100);
  EXPECT_EQ(Value("dlo_rank_startup_bytes{kind=\"mapped\",rank=\"1\"}"), 200);
  EXPECT_EQ(Value("dlo_rank_components{backing=\"memory\",rank=\"1\"}"), 2);
  EXPECT_EQ(Value("dlo_rank_components{backing=\"artifact\",rank=\"1\"}"), 1);
  // The next start of the rank replaces what is its own.
  metrics_.workers().Startup(1, v1::StartupRecord());
  EXPECT_EQ(Value("dlo_rank_components{backing=\"memory\",rank=\"1\"}"), 0);
  EXPECT_EQ(Value("dlo_startups_total{outcome=\"other\"}"), 1);
}

TEST_F(MetricsTest, ARankIsInOneStateAndHoldsNothingWhileItHasNoProcess) {
  const auto state = [this](const char* name) {
    return Value(absl::StrCat("dlo_rank_state{rank=\"1\",state=\"", name, "\"}"));
  };
  EXPECT_EQ(state("down"), 1);
  v1::RankMemory memory;
  memory.set_device_used_bytes(900);
  memory.set_device_peak_bytes(1000);
  memory.set_device_weights_bytes(600);
  memory.set_device_activations_bytes(300);
  memory.set_host_pss_bytes(5000);
  memory.set_host_shared_clean_bytes(70);
  memory.set_pinned_bytes(11);
  memory.set_mapped_bytes(12);
  RankMetrics& rank = metrics_.rank(1);
  rank.SetState(RankState::kReady);
  rank.SetMemory(memory);
  EXPECT_EQ(state("down"), 0);
  EXPECT_EQ(state("ready"), 1);
  const auto device = [this](const char* kind) {
    return Value(absl::StrCat("dlo_rank_device_memory_bytes{kind=\"", kind, "\",rank=\"1\"}"));
  };
  const auto host = [this](const char* kind) {
    return Value(absl::StrCat("dlo_rank_host_memory_bytes{kind=\"", kind, "\",rank=\"1\"}"));
  };
  EXPECT_EQ(device("used"), 900);
  EXPECT_EQ(device("peak"), 1000);
  EXPECT_EQ(device("weights"), 600);
  EXPECT_EQ(device("activations"), 300);
  EXPECT_EQ(host("pss"), 5000);
  EXPECT_EQ(host("shared_clean"), 70);
  EXPECT_TRUE(std::isnan(host("private_dirty"))) << "the kernel did not tell";
  EXPECT_EQ(Value("dlo_rank_pinned_bytes{rank=\"1\"}"), 11);
  EXPECT_EQ(Value("dlo_rank_mapped_bytes{rank=\"1\"}"), 12);
  EXPECT_EQ(Value("dlo_rank_mapped_bytes{rank=\"0\"}"), 0);
  rank.SetState(RankState::kDown);
  EXPECT_EQ(device("used"), 0);
  EXPECT_EQ(host("pss"), 0);
  EXPECT_EQ(host("private_dirty"), 0);
}

TEST_F(MetricsTest, WhatStreamingTookAddsUpOverStagesAndAssignments) {
  v1::RankUsage usage;
  usage.set_bus_bytes(1000);
  for (int stage = 0; stage < 2; ++stage) {
    v1::StageStreaming* streaming = usage.add_streaming();
    streaming->set_fabric_bytes(30);
    streaming->set_packed_bytes(4);
    *streaming->mutable_copy_stall() = ToProto(absl::Milliseconds(250));
    *streaming->mutable_gather_stall() = ToProto(absl::Milliseconds(500));
    *streaming->mutable_pack_stall() = ToProto(absl::Seconds(1));
  }
  metrics_.rank(0).AddUsage(usage);
  metrics_.rank(0).AddUsage(usage);
  EXPECT_EQ(Value("dlo_rank_bus_bytes_total{rank=\"0\"}"), 2000);
  EXPECT_EQ(Value("dlo_rank_fabric_bytes_total{rank=\"0\"}"), 120);
  EXPECT_EQ(Value("dlo_rank_packed_bytes_total{rank=\"0\"}"), 16);
  const auto stall = [this](const char* move) {
    return Value(
        absl::StrCat("dlo_rank_streaming_stall_seconds_total{move=\"", move, "\",rank=\"0\"}"));
  };
  EXPECT_EQ(stall("copy"), 1);
  EXPECT_EQ(stall("gather"), 2);
  EXPECT_EQ(stall("pack"), 4);
  EXPECT_EQ(Value("dlo_rank_bus_bytes_total{rank=\"1\"}"), 0);
}

TEST_F(MetricsTest, TwoServersInOneProcessShareNothing) {
  const auto other_registry = std::make_shared<prometheus::Registry>();
  ServerMetrics other(1, other_registry);
  other.requests().Refused("INVALID_ARGUMENT");
  EXPECT_EQ(Value("dlo_requests_total{outcome=\"refused\"}"), 0);
}

TEST_F(MetricsTest, AServerListensOnAPortOfItsChoiceAndFreesItAtTheEnd) {
  std::string address;
  {
    const auto server = MetricsServer::Start("127.0.0.1:0", metrics_.collectables());
    ASSERT_TRUE(server.ok()) << server.status();
    address = (*server)->address();
    EXPECT_THAT(address, testing::MatchesRegex("127\\.0\\.0\\.1:[1-9][0-9]*"));
    const auto second = MetricsServer::Start(address, metrics_.collectables());
    EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(second.status().message(), HasSubstr("metrics_listen is \"" + address + "\""));
    EXPECT_THAT(second.status().message(), HasSubstr("Address already in use"));
    EXPECT_THAT(second.status().message(), HasSubstr("choose another address"));
  }
  EXPECT_TRUE(MetricsServer::Start(address, metrics_.collectables()).ok());
}

TEST_F(MetricsTest, AnAddressThatIsNotThisMachinesSaysSo) {
  const auto server = MetricsServer::Start("192.0.2.1:0", metrics_.collectables());
  EXPECT_EQ(server.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(server.status().message(), HasSubstr("Cannot assign requested address"));
}

class CgroupTest : public testing::Test {
 protected:
  CgroupTest() {
    std::string pattern = (fs::temp_directory_path() / "cgroup-test-XXXXXX").string();
    root_ = mkdtemp(pattern.data());
  }
  ~CgroupTest() override { fs::remove_all(root_); }
  void Write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  fs::path root_;
};

TEST_F(CgroupTest, ReadsVersion2) {
  Write("proc/self/cgroup", "0::/system.slice/dlo.service\n");
  Write("sys/fs/cgroup/system.slice/dlo.service/memory.current", "123456789\n");
  Write("sys/fs/cgroup/system.slice/dlo.service/memory.max", "2000000000\n");
  EXPECT_EQ(ReadCgroupMemory(root_).used_bytes, 123456789);
  EXPECT_EQ(ReadCgroupMemory(root_).limit_bytes, 2000000000);
  Write("sys/fs/cgroup/system.slice/dlo.service/memory.max", "max\n");
  EXPECT_EQ(ReadCgroupMemory(root_).limit_bytes, std::numeric_limits<double>::infinity());
}

TEST_F(CgroupTest, AContainersOwnCgroupIsTheRootOfTheMount) {
  Write("proc/self/cgroup", "0::/as/the/host/has/it\n");
  Write("sys/fs/cgroup/memory.current", "5\n");
  Write("sys/fs/cgroup/memory.max", "6\n");
  EXPECT_EQ(ReadCgroupMemory(root_).used_bytes, 5);
  EXPECT_EQ(ReadCgroupMemory(root_).limit_bytes, 6);
}

TEST_F(CgroupTest, ReadsVersion1WhereTheMemoryControllerIsThere) {
  Write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/a:b\n0::/\n");
  Write("sys/fs/cgroup/memory.current", "1\n");
  Write("sys/fs/cgroup/memory/a:b/memory.usage_in_bytes", "77\n");
  Write("sys/fs/cgroup/memory/a:b/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(ReadCgroupMemory(root_).used_bytes, 77);
  EXPECT_EQ(ReadCgroupMemory(root_).limit_bytes, std::numeric_limits<double>::infinity());
  Write("sys/fs/cgroup/memory/a:b/memory.limit_in_bytes", "1048576\n");
  EXPECT_EQ(ReadCgroupMemory(root_).limit_bytes, 1048576);
}

TEST_F(CgroupTest, WithoutACgroupBothAreNan) {
  EXPECT_TRUE(std::isnan(ReadCgroupMemory(root_).used_bytes));
  EXPECT_TRUE(std::isnan(ReadCgroupMemory(root_).limit_bytes));
  // The root of version 2 has no figures.
  Write("proc/self/cgroup", "0::/\n");
  EXPECT_TRUE(std::isnan(ReadCgroupMemory(root_).used_bytes));
}

}  // namespace
}  // namespace dlo
