#include "server/loss_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace dlo {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr absl::Time kStart = absl::UnixEpoch();

// A rank's log, written record by record.
class Trace {
 public:
  explicit Trace(int rank) { trace_.rank = rank; }

  Trace& Gather(uint64_t sequence, FlightState state, const std::string& group = "weights/0") {
    FlightRecord& record = Add(FlightOp::kAllGather, state);
    record.group = group;
    record.group_sequence = sequence;
    return *this;
  }
  Trace& Visit(int64_t visit, FlightState state) {
    visit_ = visit;
    Add(FlightOp::kVisit, state);
    return *this;
  }
  // NOLINTNEXTLINE(google-explicit-constructor): the cases below list traces.
  operator RankTrace() const { return trace_; }

 private:
  FlightRecord& Add(FlightOp op, FlightState state) {
    FlightRecord& record = trace_.log.records.emplace_back();
    record.sequence = ++trace_.log.begun;
    record.begin =
        kStart + absl::Milliseconds(10) * record.sequence + absl::Milliseconds(trace_.rank);
    record.place = {.wave = 5, .stage = FlightStage::kDenoise, .step = 3, .visit = visit_};
    record.op = op;
    record.state = state;
    record.duration = absl::Milliseconds(2);
    return record;
  }

  RankTrace trace_;
  int64_t visit_ = 0;
};

constexpr FlightState kBegun = FlightState::kBegun;
constexpr FlightState kDone = FlightState::kDone;
constexpr FlightState kFailed = FlightState::kFailed;

RankLoss LossOf(int rank) { return {.rank = rank, .cause = "exited with code 1", .exit_code = 1}; }

struct Case {
  const char* name;
  RankLoss loss;
  std::vector<RankTrace> traces;
  int blamed;
};

std::vector<Case> Cases() {
  const Trace waits_in_39 = Trace(0).Gather(38, kDone).Gather(39, kBegun).Visit(38, kBegun);
  RankLoss certain = LossOf(0);
  certain.certain = true;
  return {
      {"OneThatComputesIsToBlameItself",
       LossOf(1),
       {waits_in_39, Trace(1).Gather(38, kDone).Visit(37, kBegun)},
       1},
      {"OneThatWaitsIsNotWhileAnotherHasNotCome",
       LossOf(0),
       {waits_in_39, Trace(1).Gather(38, kDone).Visit(37, kBegun)},
       1},
      {"NorOneThatFailedInIt",
       LossOf(0),
       {Trace(0).Gather(38, kDone).Gather(39, kFailed), Trace(1).Gather(38, kDone)},
       1},
      {"OneWhoseLossIsCertainIs",
       certain,
       {waits_in_39, Trace(1).Gather(38, kDone).Visit(37, kBegun)},
       0},
      {"WhereAllHaveComeItStays", LossOf(0), {waits_in_39, Trace(1).Gather(39, kBegun)}, 0},
      {"TheFurthestBehindIs",
       LossOf(0),
       {waits_in_39, Trace(1).Gather(38, kDone), Trace(2).Gather(36, kDone).Visit(35, kBegun)},
       2},
      {"ItPassesOnThroughGroups",
       LossOf(0),
       {waits_in_39, Trace(1).Gather(38, kDone).Gather(7, kBegun, "tp/1"),
        Trace(2).Gather(38, kDone).Gather(6, kDone, "tp/1")},
       2},
      {"OneThatNeverGatheredIs", LossOf(0), {waits_in_39, Trace(1).Visit(1, kBegun)}, 1},
      {"OneOfAnotherGroupIsNot",
       LossOf(0),
       {Trace(0).Gather(3, kBegun, "replica/0"), Trace(1).Gather(2, kBegun, "replica/1")},
       0},
      {"OneOnAnotherHostLeavesNoTrace", LossOf(0), {waits_in_39, RankTrace{.rank = 1}}, 0},
      {"NothingIsKnownWithoutTraces", LossOf(0), {}, 0},
  };
}

class JudgeTest : public testing::TestWithParam<Case> {};

TEST_P(JudgeTest, TheBlameGoesToTheFirstToFallBehind) {
  const Case& c = GetParam();
  const RankLoss loss = Judge(c.loss, c.traces);
  EXPECT_EQ(loss.rank, c.blamed) << loss.verdict;
  EXPECT_EQ(loss.exit_code.has_value(), c.blamed == c.loss.rank);
  EXPECT_EQ(loss.reason, c.loss.reason);
}

INSTANTIATE_TEST_SUITE_P(All, JudgeTest, testing::ValuesIn(Cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(LossReportTest, TheVerdictIsOneLineThatBeginsWithTheBlamed) {
  const std::vector<RankTrace> traces = {Trace(0).Gather(38, kDone).Gather(39, kBegun),
                                         Trace(1).Gather(38, kDone).Visit(37, kBegun)};
  const RankLoss loss = Judge(LossOf(0), traces);
  EXPECT_EQ(
      loss.verdict,
      "rank 1 did not come to AllGather #39 of weights/0, in which rank 0 waited (rank 0 exited "
      "with code 1): rank 1 was in visit 37 (wave 5, denoise, step 3, visit 37) after "
      "AllGather #38 of weights/0; rank 0 was in AllGather #39 of weights/0 (wave 5, denoise, "
      "step 3) after AllGather #38 of weights/0");
  const std::string report = LossReport(loss, traces, kStart);
  EXPECT_THAT(report,
              AllOf(HasSubstr("To blame: rank 1, which did not come to AllGather #39"),
                    HasSubstr("Verdict:  " + loss.verdict),
                    HasSubstr("  rank 0 was in AllGather #39"), HasSubstr("2 operations in all")));
  // Merged by time.
  const size_t first = report.find("rank 0  00:00:00.010000 #1  AllGather #38");
  const size_t second = report.find("rank 1  00:00:00.011000 #1  AllGather #38");
  const size_t third = report.find("rank 0  00:00:00.020000 #2  AllGather #39");
  EXPECT_LT(first, second);
  EXPECT_LT(second, third);
  EXPECT_LT(third, report.size());
}

TEST(LossReportTest, AVisitThatWaitsForAGatherSaysSo) {
  const RankLoss loss =
      Judge(LossOf(0), {Trace(0).Gather(38, kDone).Gather(39, kBegun).Visit(38, kBegun)});
  EXPECT_THAT(loss.verdict,
              HasSubstr("rank 0 was in visit 38 (wave 5, denoise, step 3, visit 38) with AllGather "
                        "#39 of weights/0 under way after AllGather #38"));
}

TEST(LossReportTest, AVerdictOverManyRanksFitsIntoAnErrorsMetadata) {
  std::vector<RankTrace> traces;
  for (int rank = 0; rank < 100; ++rank) traces.push_back(Trace(rank).Visit(rank, kBegun));
  EXPECT_LE(Judge(LossOf(70), traces).verdict.size(), 600u);
  EXPECT_THAT(Judge(LossOf(70), traces).verdict, HasSubstr(": rank 70 was in visit 70"));
}

TEST(LossReportTest, OfReportsOnlyTheLatestAreKept) {
  std::string pattern = (std::filesystem::temp_directory_path() / "reports-XXXXXX").string();
  const std::filesystem::path folder = mkdtemp(pattern.data());
  const ReportFolder reports(folder / "reports", 3);
  std::vector<std::string> paths;
  for (int i = 0; i < 5; ++i) {
    const auto path = reports.Write(0, "report", kStart + absl::Seconds(i));
    ASSERT_TRUE(path.ok()) << path.status();
    paths.push_back(*path);
    if (i == 0) std::ofstream(folder / "reports/notes.txt") << "not ours";
  }
  for (int i = 0; i < 5; ++i) EXPECT_EQ(std::filesystem::exists(paths[i]), i >= 2) << paths[i];
  EXPECT_TRUE(std::filesystem::exists(folder / "reports/notes.txt"));
  std::stringstream text;
  text << std::ifstream(paths[4]).rdbuf();
  EXPECT_EQ(text.str(), "report");
  EXPECT_FALSE(ReportFolder("/proc/none", 3).Write(0, "x", kStart).ok());
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace dlo
