#include "offload/visit_plan.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace dlo {

void VisitPlan::Add(int ring, int64_t passes) {
  if (passes <= 0 || ring_sizes_.at(ring) == 0) return;
  if (!runs_.empty() && runs_.back().ring == ring) {
    runs_.back().passes += passes;
  } else {
    runs_.push_back({ring, passes});
  }
}

int64_t VisitPlan::num_visits() const {
  int64_t visits = 0;
  for (const Run& run : runs_) visits += run.passes * ring_sizes_[run.ring];
  return visits;
}

std::string VisitPlan::digest() const {
  return absl::StrCat(absl::StrJoin(ring_sizes_, ","), ":",
                      absl::StrJoin(runs_, ",", [](std::string* out, const Run& run) {
                        absl::StrAppend(out, run.ring, "x", run.passes);
                      }));
}

void VisitPlan::Cursor::Next() {
  ++visit_;
  if (++block_ < plan_->ring_sizes_[ring()]) return;
  block_ = 0;
  if (++pass_ < plan_->runs_[run_].passes) return;
  pass_ = 0;
  ++run_;
}

}  // namespace dlo
