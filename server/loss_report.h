// What the flight recorders of a dispatch domain say when it is lost: which rank stopped where.
//
//   std::vector<RankTrace> traces = ...;       // read before anything is killed
//   loss = Judge(std::move(loss), traces);     // whom to blame, and a line that says why
//   loss.report = *reports.Write(domain, LossReport(loss, traces, now), now);
//
// A rank that waits in a collective, or failed in one, is no culprit while another rank of the
// group has not begun that operation: the blame passes on to that one, and from it maybe further.
// Only a loss that is `certain` stays where it is.
//
// Judge and LossReport are pure. A ReportFolder belongs to one thread.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/flight_recorder.h"
#include "server/rank.h"

namespace dlo {

struct RankTrace {
  int rank = 0;
  FlightLog log;  // empty if its recorder is on another host
};

// `loss` with its verdict, and with another rank and cause where the blame passed on.
RankLoss Judge(RankLoss loss, const std::vector<RankTrace>& traces);

// The verdict, where each rank stopped, and their last operations merged by time.
std::string LossReport(const RankLoss& loss, const std::vector<RankTrace>& traces, absl::Time now);

class ReportFolder {
 public:
  // Made when the first report comes. Of our reports only the latest `files_max` are kept.
  ReportFolder(std::filesystem::path folder, int files_max)
      : folder_(std::move(folder)), files_max_(files_max) {}

  // The file's path.
  absl::StatusOr<std::string> Write(int domain, const std::string& report, absl::Time now) const;

 private:
  const std::filesystem::path folder_;
  const int files_max_;
};

}  // namespace dlo
