#include "server/loss_report.h"

#include <algorithm>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/status_details.h"

namespace dlo {
namespace {

// The verdict travels in the metadata of an error, which a client accepts up to 8 KiB.
constexpr size_t kVerdictBytesMax = 600;
constexpr size_t kTimelineRecordsMax = 2048;
constexpr size_t kTimelineRecordsOfARankMin = 32;

constexpr char kPrefix[] = "loss-";

const RankTrace* TraceOf(const std::vector<RankTrace>& traces, int rank) {
  for (const RankTrace& trace : traces) {
    if (trace.rank == rank && !trace.log.records.empty()) return &trace;
  }
  return nullptr;
}

const FlightRecord* LastCompleted(const FlightLog& log) {
  const FlightRecord* last = nullptr;
  for (const FlightRecord& record : log.records) {
    if (record.state != FlightState::kDone) continue;
    if (last == nullptr || record.begin + record.duration >= last->begin + last->duration) {
      last = &record;
    }
  }
  return last;
}

// The innermost: the one that was begun last.
const FlightRecord* Unfinished(const FlightLog& log) {
  for (auto record = log.records.rbegin(); record != log.records.rend(); ++record) {
    if (record->state == FlightState::kBegun) return &*record;
  }
  return nullptr;
}

uint64_t LastOf(const FlightLog& log, const std::string& group) {
  uint64_t last = 0;
  for (const FlightRecord& record : log.records) {
    if (IsCollective(record.op) && record.group == group) {
      last = std::max(last, record.group_sequence);
    }
  }
  return last;
}

// The first collective that the rank did not get through: it waits there, or failed and gave up.
const FlightRecord* WaitsIn(const FlightLog& log) {
  for (const FlightRecord& record : log.records) {
    if (IsCollective(record.op) && record.state != FlightState::kDone) return &record;
  }
  return nullptr;
}

// The rank that is furthest from beginning what `waiting` waits in; null: all have begun it.
const RankTrace* Behind(const FlightRecord& waiting, const std::vector<RankTrace>& traces) {
  const RankTrace* behind = nullptr;
  uint64_t behind_at = waiting.group_sequence;
  for (const RankTrace& trace : traces) {
    if (trace.log.records.empty()) continue;
    const uint64_t at = LastOf(trace.log, waiting.group);
    // A rank that knows nothing of the group may be none of it; all are of that of the weights.
    if (at == 0 && !absl::StartsWith(waiting.group, "weights/")) continue;
    if (at >= waiting.group_sequence) continue;
    if (behind == nullptr || at < behind_at) {
      behind = &trace;
      behind_at = at;
    }
  }
  return behind;
}

std::string StopText(const RankTrace& trace) {
  if (trace.log.records.empty()) {
    return absl::StrCat("rank ", trace.rank, " left no record here");
  }
  const FlightRecord* const unfinished = Unfinished(trace.log);
  const FlightRecord* const completed = LastCompleted(trace.log);
  std::string text = absl::StrCat("rank ", trace.rank, " ");
  if (unfinished == nullptr) {
    absl::StrAppend(&text, "had nothing unfinished");
  } else {
    absl::StrAppend(&text, "was in ", unfinished->OpText(), " (", PlaceText(unfinished->place),
                    ")");
    // A visit waits for the gather that another thread does.
    const FlightRecord* const waits_in = WaitsIn(trace.log);
    if (waits_in != nullptr && waits_in != unfinished) {
      absl::StrAppend(&text, " with ", waits_in->OpText(),
                      waits_in->state == FlightState::kBegun ? " under way" : " failed");
    }
  }
  if (completed != nullptr) absl::StrAppend(&text, " after ", completed->OpText());
  return text;
}

}  // namespace

RankLoss Judge(RankLoss loss, const std::vector<RankTrace>& traces) {
  const std::string first = absl::StrCat("rank ", loss.rank, " ", loss.cause);
  // Each rank can pass the blame on once.
  for (size_t i = 0; i < traces.size() && !loss.certain; ++i) {
    const RankTrace* const trace = TraceOf(traces, loss.rank);
    const FlightRecord* const waiting = trace == nullptr ? nullptr : WaitsIn(trace->log);
    const RankTrace* const behind = waiting == nullptr ? nullptr : Behind(*waiting, traces);
    if (behind == nullptr) break;
    const std::string operation = waiting->OpText();
    loss.cause =
        absl::StrCat("did not come to ", operation, ", in which rank ", loss.rank,
                     waiting->state == FlightState::kBegun ? " waited (" : " failed (", first, ")");
    loss.rank = behind->rank;
    loss.signal.reset();
    loss.exit_code.reset();
  }
  std::vector<std::string> stops;
  for (const RankTrace& trace : traces) {
    // Whom the line is about goes first.
    stops.insert(trace.rank == loss.rank ? stops.begin() : stops.end(), StopText(trace));
  }
  if (!stops.empty()) {
    loss.verdict =
        Clip(absl::StrCat("rank ", loss.rank, " ", loss.cause, ": ", absl::StrJoin(stops, "; ")),
             kVerdictBytesMax);
  }
  return loss;
}

std::string LossReport(const RankLoss& loss, const std::vector<RankTrace>& traces, absl::Time now) {
  std::string text =
      absl::StrCat("Loss of a dispatch domain, ", absl::FormatTime(now, absl::UTCTimeZone()),
                   "\n\nReason:   ", loss.reason, "\nTo blame: rank ", loss.rank, ", which ",
                   loss.cause, "\nVerdict:  ", loss.verdict, "\n\nWhere the ranks stopped\n");
  struct Line {
    int rank;
    const FlightRecord* record;
  };
  std::vector<Line> lines;
  const size_t of_each = std::max(kTimelineRecordsOfARankMin,
                                  kTimelineRecordsMax / std::max<size_t>(1, traces.size()));
  for (const RankTrace& trace : traces) {
    const std::vector<FlightRecord>& records = trace.log.records;
    absl::StrAppend(&text, "  ", StopText(trace), "; ", trace.log.begun, " operations in all");
    if (trace.log.torn > 0) absl::StrAppend(&text, ", ", trace.log.torn, " half-written");
    absl::StrAppend(&text, "\n");
    for (size_t i = records.size() - std::min(records.size(), of_each); i < records.size(); ++i) {
      lines.push_back({trace.rank, &records[i]});
    }
  }
  std::stable_sort(lines.begin(), lines.end(),
                   [](const Line& a, const Line& b) { return a.record->begin < b.record->begin; });
  absl::StrAppend(&text, "\nTheir last operations, by the time of their beginning (UTC)\n");
  for (const Line& line : lines) {
    absl::StrAppend(&text, "  rank ", line.rank, "  ", line.record->Line(), "\n");
  }
  return text;
}

absl::StatusOr<std::string> ReportFolder::Write(int domain, const std::string& report,
                                                absl::Time now) const {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  std::filesystem::permissions(folder_, std::filesystem::perms::owner_all, error);
  // Names in the order of time.
  const std::filesystem::path path =
      folder_ / absl::StrCat(kPrefix, absl::FormatTime("%Y%m%dT%H%M%E6S", now, absl::UTCTimeZone()),
                             "Z-domain", domain, ".txt");
  std::ofstream out(path);
  out << report;
  out.close();
  if (!out) {
    std::filesystem::remove(path, error);
    return absl::UnavailableError(absl::StrCat("cannot write ", path.string()));
  }
  std::vector<std::filesystem::path> reports;
  // A range-for would throw where the folder cannot be read to its end.
  for (std::filesystem::directory_iterator entry(folder_, error), end; !error && entry != end;
       entry.increment(error)) {
    if (absl::StartsWith(entry->path().filename().string(), kPrefix)) {
      reports.push_back(entry->path());
    }
  }
  std::sort(reports.begin(), reports.end());
  for (size_t i = 0; i + static_cast<size_t>(files_max_) < reports.size(); ++i) {
    std::filesystem::remove(reports[i], error);
  }
  return path.string();
}

}  // namespace dlo
