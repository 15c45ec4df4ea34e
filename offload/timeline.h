// The timeline of one request, for Perfetto (ui.perfetto.dev) or chrome://tracing.
//
//   Timeline timeline{.rank = 0, .ring_names = {"text_encoder", "transformer"}};
//   timeline.stages.push_back({"denoise", begin, end});
//   timeline.visits = &log;
//   std::string json = TimelineJson(timeline);
//
// JSON in the Trace Event Format: complete events ("ph":"X") with times in microseconds from the
// request's start, on one track each for stages and steps, computing, and each kind of move. A
// visit is an event of the same name ("transformer 12") on each of its tracks, with its number as
// `args.visit`; the computing's waiting for it is an event "wait" before it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "offload/visit_log.h"

namespace dlo {

struct TimelineSpan {
  std::string name;
  absl::Duration begin;
  absl::Duration end;
};

// All names are ours: nothing in them needs quoting.
struct Timeline {
  int rank = 0;
  std::vector<TimelineSpan> stages;
  std::vector<TimelineSpan> steps;   // within the stages
  const VisitLog* visits = nullptr;  // null: nothing is streamed
  std::vector<std::string> ring_names;
  absl::string_view fill_kind;     // "pack" or "copy"; empty: visits have no fill
  absl::string_view deliver_kind;  // "copy" or "gather"
};

std::string TimelineJson(const Timeline& timeline);

}  // namespace dlo
