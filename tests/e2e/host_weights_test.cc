// The real programs with a store of host weights: two workers that start without an artifact, with
// one, and again after a loss.
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "dlo/v1/video_generation.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "gtest/gtest.h"
#include "loader/test_folder.h"
#include "tests/e2e/child_process.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr absl::Duration kTimeout = absl::Minutes(2);
constexpr int kRanks = 2;

std::string Binary(const std::string& name) { return absl::StrCat(DLO_BINARY_DIR, "/bin/", name); }

class HostWeightsTest : public testing::Test {
 protected:
  // Stored as float32, runs as bfloat16.
  HostWeightsTest() {
    fs::copy(fs::path(DLO_SOURCE_DIR) / "tests/goldens/pipelines/wan21/repo", folder_ / "repo",
             fs::copy_options::recursive);
  }
  ~HostWeightsTest() override {
    if (serve_ != nullptr) Stop();
  }

  std::vector<std::string> Arguments(const std::string& mode) const {
    return {"--model",
            (folder_ / "repo").native(),
            "--dtype",
            "bfloat16",
            "--dp",
            absl::StrCat(kRanks),
            "--transfer",
            "rank-local",
            "--host-weight-runtime-mode",
            mode,
            "--host-weight-runtime-root",
            (folder_ / "store").native(),
            "--listen",
            "127.0.0.1:0",
            "--data-dir",
            (folder_ / "data").native()};
  }
  void Spawn(const std::string& mode) {
    std::vector<std::string> arguments = Arguments(mode);
    arguments.insert(arguments.begin(), Binary("dlo-serve"));
    auto serve = ChildProcess::Start(arguments, {"OMP_NUM_THREADS=1"});
    ASSERT_TRUE(serve.ok()) << serve.status();
    serve_ = *std::move(serve);
  }
  // Until both ranks are ready.
  v1::ServerStatus Start(const std::string& mode) {
    Spawn(mode);
    const auto line = serve_->WaitForLine("serving on ", kTimeout);
    EXPECT_TRUE(line.ok()) << line.status() << serve_->output();
    if (!line.ok()) return {};
    const std::vector<std::string> parts = absl::StrSplit(*line, "serving on ");
    endpoint_ = parts.back().substr(0, parts.back().find_first_of(" ,\n"));
    return WaitStatus([](const v1::ServerStatus& status) {
      return std::all_of(status.ranks().begin(), status.ranks().end(),
                         [](const v1::RankStatus& rank) { return rank.ready(); });
    });
  }
  void Stop() {
    serve_->Signal(SIGTERM);
    const auto code = serve_->Wait(kTimeout);
    EXPECT_TRUE(code.ok() && *code == 0) << serve_->output();
    serve_.reset();
  }

  v1::ServerStatus WaitStatus(const std::function<bool(const v1::ServerStatus&)>& found) {
    const auto stub = v1::VideoGeneration::NewStub(
        grpc::CreateChannel(endpoint_, grpc::InsecureChannelCredentials()));
    const absl::Time deadline = absl::Now() + kTimeout;
    v1::ServerStatus status;
    do {
      grpc::ClientContext context;
      context.set_deadline(absl::ToChronoTime(deadline));
      EXPECT_TRUE(stub->GetStatus(&context, {}, &status).ok());
      if (found(status)) return status;
      absl::SleepFor(absl::Milliseconds(20));
    } while (absl::Now() < deadline);
    ADD_FAILURE() << status.DebugString() << serve_->output();
    return status;
  }

  std::string Client(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), Binary("dlo-client"));
    auto client = ChildProcess::Start(arguments);
    EXPECT_TRUE(client.ok()) << client.status();
    (*client)->Wait(kTimeout).IgnoreError();
    return (*client)->output();
  }

  // The videos of as many requests at once as there are ranks.
  std::set<std::string> Videos() {
    std::vector<std::unique_ptr<ChildProcess>> clients;
    for (int i = 0; i < kRanks; ++i) {
      clients.push_back(*ChildProcess::Start(
          {Binary("dlo-client"), "generate", "--endpoint", endpoint_, "--prompt", "a star",
           "--seed", "1", "--width", "64", "--height", "64", "--frames", "5", "--steps", "2",
           "--quiet", "--output", Video(i).native()}));
    }
    std::set<std::string> videos;
    for (int i = 0; i < kRanks; ++i) {
      const auto code = clients[i]->Wait(kTimeout);
      EXPECT_TRUE(code.ok() && *code == 0) << clients[i]->output() << serve_->output();
      std::ifstream in(Video(i), std::ios::binary);
      videos.insert({std::istreambuf_iterator<char>(in), {}});
    }
    return videos;
  }
  fs::path Video(int i) const { return folder_ / absl::StrCat("video", i, ".safetensors"); }

  // Rank -> process.
  std::map<std::string, pid_t> Workers() const {
    std::map<std::string, pid_t> workers;
    for (const auto& entry : fs::directory_iterator("/proc")) {
      int pid = 0;
      if (!absl::SimpleAtoi(entry.path().filename().native(), &pid)) continue;
      std::ifstream stat(entry.path() / "stat");
      std::string line;
      std::getline(stat, line);
      const std::vector<std::string> fields = absl::StrSplit(
          line.substr(std::min(line.rfind(')') + 1, line.size())), ' ', absl::SkipEmpty());
      if (fields.size() < 2 || fields[1] != absl::StrCat(serve_->pid())) continue;
      std::ifstream arguments(entry.path() / "cmdline");
      for (std::string argument; std::getline(arguments, argument, '\0');) {
        if (absl::StartsWith(argument, "--rank=")) workers[argument.substr(7)] = pid;
      }
    }
    return workers;
  }
  // Device and inode of the artifact's files that a process has mapped.
  static std::set<std::string> MappedInodes(pid_t pid) {
    std::set<std::string> inodes;
    std::ifstream maps(absl::StrCat("/proc/", pid, "/maps"));
    for (std::string line; std::getline(maps, line);) {
      if (!absl::StrContains(line, "/artifacts/")) continue;
      const std::vector<std::string> fields = absl::StrSplit(line, ' ', absl::SkipEmpty());
      inodes.insert(absl::StrCat(fields[3], " ", fields[4]));
    }
    return inodes;
  }

  TempFolder folder_;
  std::unique_ptr<ChildProcess> serve_;
  std::string endpoint_;
};

TEST_F(HostWeightsTest, OneRankPublishesAndTheNextStartOfAllReadsNoWeights) {
  const v1::ServerStatus disabled = Start("disabled");
  ASSERT_EQ(disabled.ranks_size(), kRanks);
  for (const v1::RankStatus& rank : disabled.ranks()) {
    EXPECT_EQ(rank.startup().outcome(), "canonical-direct");
    EXPECT_EQ(rank.startup().hashed_bytes(), 0);
  }
  const std::set<std::string> canonical = Videos();
  EXPECT_EQ(canonical.size(), 1u);
  Stop();
  EXPECT_FALSE(fs::exists(folder_ / "store"));

  const v1::ServerStatus cold = Start("preferred");
  std::multiset<std::string> publications;
  for (const v1::RankStatus& rank : cold.ranks()) {
    // One that was so late that it found the other's artifact has read nothing.
    const bool late = rank.startup().outcome() == "local-hit";
    EXPECT_TRUE(late || rank.startup().outcome() == "canonical-fallback");
    EXPECT_EQ(rank.startup().read_bytes() == 0, late);
    publications.insert(late ? "late" : rank.startup().publication().outcome());
  }
  EXPECT_EQ(publications.count("published"), 1u) << cold.DebugString();
  // The other one came while that was building, or after it.
  EXPECT_EQ(publications.count("busy") + publications.count("already-present") +
                publications.count("late"),
            1u)
      << cold.DebugString();
  EXPECT_EQ(Videos(), canonical);
  Stop();

  const v1::ServerStatus warm = Start("required");
  for (const v1::RankStatus& rank : warm.ranks()) {
    const v1::StartupRecord& record = rank.startup();
    EXPECT_EQ(record.outcome(), "local-hit");
    EXPECT_EQ(record.artifact(), cold.ranks(0).startup().artifact());
    EXPECT_EQ(record.read_bytes(), 0);
    EXPECT_EQ(record.hashed_bytes(), 0);
    EXPECT_GT(record.mapped_bytes(), 0);
    EXPECT_FALSE(record.has_publication());
    for (const v1::HostWeights& weights : record.host_weights()) {
      EXPECT_EQ(weights.backing(), "artifact") << weights.component();
    }
  }
  EXPECT_EQ(Videos(), canonical);
  const std::map<std::string, pid_t> workers = Workers();
  ASSERT_EQ(workers.size(), static_cast<size_t>(kRanks));
  EXPECT_EQ(MappedInodes(workers.at("0")).size(), 3u);
  EXPECT_EQ(MappedInodes(workers.at("0")), MappedInodes(workers.at("1")));
  EXPECT_THAT(Client({"status", "--endpoint", endpoint_}),
              testing::AllOf(HasSubstr("SERVING\n"),
                             HasSubstr("rank 0: ready; weights: local-hit (required)"),
                             HasSubstr("rank 1: ready; weights: local-hit (required)"),
                             HasSubstr("  transformer: artifact\n")));

  // A rank that is lost comes back from the artifact, too, and its lease was no hindrance.
  kill(workers.at("1"), SIGKILL);
  WaitStatus([](const v1::ServerStatus& status) { return !status.ranks(1).ready(); });
  const v1::ServerStatus again =
      WaitStatus([](const v1::ServerStatus& status) { return status.ranks(1).ready(); });
  EXPECT_NE(Workers().at("1"), workers.at("1"));
  EXPECT_EQ(again.ranks(1).startup().outcome(), "local-hit");
  EXPECT_NE(again.ranks(1).startup().resolution_id(), warm.ranks(1).startup().resolution_id());
  EXPECT_EQ(Videos(), canonical);
}

TEST_F(HostWeightsTest, RequiredWithoutAnArtifactEndsTheServerAndSaysWhy) {
  Spawn("required");
  const auto code = serve_->Wait(kTimeout);
  ASSERT_TRUE(code.ok()) << code.status();
  EXPECT_EQ(*code, 1);
  EXPECT_THAT(serve_->output(), HasSubstr("could not load the model"));
  EXPECT_THAT(serve_->output(), HasSubstr("miss"));
  serve_.reset();
}

TEST_F(HostWeightsTest, CheckSaysWhatAStartWouldDo) {
  const auto check = [this](const std::string& mode) {
    std::vector<std::string> arguments = Arguments(mode);
    arguments.insert(arguments.begin(), {Binary("dlo-serve"), "check"});
    auto serve = ChildProcess::Start(arguments);
    EXPECT_TRUE(serve.ok()) << serve.status();
    const auto code = (*serve)->Wait(kTimeout);
    return absl::StrCat(code.ok() ? *code : -1, " ", (*serve)->output());
  };
  EXPECT_THAT(check("preferred"),
              testing::AllOf(testing::StartsWith("0 "), HasSubstr("a start loads the checkpoint")));
  EXPECT_THAT(check("required"), testing::StartsWith("1 "));
  Start("preferred");
  Stop();
  EXPECT_THAT(check("required"),
              testing::AllOf(testing::StartsWith("0 "), HasSubstr(" is there, ")));
}

}  // namespace
}  // namespace dlo
