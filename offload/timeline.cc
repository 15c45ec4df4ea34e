#include "offload/timeline.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace dlo {
namespace {

enum Track : int { kStages = 1, kCompute, kFill, kDeliver };

class Writer {
 public:
  explicit Writer(int rank) : rank_(rank) {}

  void NameTrack(Track track, absl::string_view name) {
    Next();
    absl::StrAppend(&events_, R"({"ph":"M","pid":)", rank_, R"(,"tid":)", static_cast<int>(track),
                    R"(,"name":"thread_name","args":{"name":")", name, R"("}})");
  }

  void Add(Track track, absl::string_view name, absl::Duration begin, absl::Duration end,
           int64_t visit = -1) {
    Next();
    absl::StrAppendFormat(&events_,
                          R"({"ph":"X","pid":%d,"tid":%d,"ts":%.3f,"dur":%.3f,"name":"%s")", rank_,
                          static_cast<int>(track), absl::ToDoubleMicroseconds(begin),
                          absl::ToDoubleMicroseconds(end - begin), name);
    if (visit >= 0) absl::StrAppend(&events_, R"(,"args":{"visit":)", visit, "}");
    events_ += "}";
  }

  std::string Finish(int64_t dropped) {
    return absl::StrCat(R"({"displayTimeUnit":"ms","otherData":{"rank":)", rank_,
                        R"(,"visits_dropped":)", dropped, R"(},"traceEvents":[)", events_,
                        "\n]}\n");
  }

 private:
  void Next() { events_ += events_.empty() ? "\n" : ",\n"; }

  const int rank_;
  std::string events_;
};

}  // namespace

std::string TimelineJson(const Timeline& timeline) {
  Writer writer(timeline.rank);
  writer.NameTrack(kStages, "stages");
  for (const TimelineSpan& stage : timeline.stages) {
    writer.Add(kStages, stage.name, stage.begin, stage.end);
  }
  for (const TimelineSpan& step : timeline.steps) {
    writer.Add(kStages, step.name, step.begin, step.end);
  }
  if (timeline.visits == nullptr) return writer.Finish(0);

  writer.NameTrack(kCompute, "compute");
  if (!timeline.fill_kind.empty()) writer.NameTrack(kFill, timeline.fill_kind);
  writer.NameTrack(kDeliver, timeline.deliver_kind);
  const VisitLog& visits = *timeline.visits;
  for (int64_t i = 0; i < visits.size(); ++i) {
    const VisitTimes& t = visits[i];
    const std::string name = absl::StrCat(timeline.ring_names[t.ring], " ", t.block);
    if (!timeline.fill_kind.empty()) writer.Add(kFill, name, t.fill_begin, t.fill_end, t.visit);
    writer.Add(kDeliver, name, t.deliver_begin, t.deliver_end, t.visit);
    if (t.compute_begin > t.wait_begin) {
      writer.Add(kCompute, "wait", t.wait_begin, t.compute_begin, t.visit);
    }
    writer.Add(kCompute, name, t.compute_begin, t.compute_end, t.visit);
  }
  return writer.Finish(visits.dropped());
}

}  // namespace dlo
