// Everything a request will ask of the streamed weights, known before it runs.
//
//   VisitPlan plan({/*blocks of each ring*/ 24, 40, 40});
//   plan.Add(/*ring=*/0, /*passes=*/1);    // the text encoder, once
//   plan.Add(/*ring=*/1, /*passes=*/13);   // the high-noise expert for 13 steps
//   plan.Add(/*ring=*/2, /*passes=*/27);
//   for (VisitPlan::Cursor c = plan.begin(); !c.done(); c.Next()) Fetch(c.ring(), c.block());
//
// A plan is a run-length list, so its size does not depend on the number of steps. Two requests may
// share a collective wave exactly when their plans are equal. A value: copy it freely.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dlo {

class VisitPlan {
 public:
  struct Run {
    int ring = 0;
    int64_t passes = 0;  // each one visits the ring's blocks in order
    bool operator==(const Run&) const = default;
  };

  VisitPlan() = default;
  // ring_sizes[r]: streamed blocks of ring r, at least 0.
  explicit VisitPlan(std::vector<int64_t> ring_sizes) : ring_sizes_(std::move(ring_sizes)) {}

  // Appends passes over a ring; those of an empty ring, and none, leave the plan as it is. Joins
  // with an equal run before it.
  void Add(int ring, int64_t passes);

  const std::vector<int64_t>& ring_sizes() const { return ring_sizes_; }
  const std::vector<Run>& runs() const { return runs_; }
  int64_t num_visits() const;

  // Equal for equal plans: "40,40:0x13,1x27" says 13 passes over ring 0, then 27 over ring 1, of 40
  // blocks each.
  std::string digest() const;
  bool operator==(const VisitPlan&) const = default;

  // Walks the visits one by one.
  class Cursor {
   public:
    explicit Cursor(const VisitPlan* plan) : plan_(plan) {}
    bool done() const { return run_ == plan_->runs_.size(); }
    int ring() const { return plan_->runs_[run_].ring; }
    int64_t block() const { return block_; }
    int64_t visit() const { return visit_; }  // 0, 1, ...
    void Next();

   private:
    const VisitPlan* plan_;
    size_t run_ = 0;
    int64_t pass_ = 0;
    int64_t block_ = 0;
    int64_t visit_ = 0;
  };
  Cursor begin() const { return Cursor(this); }

 private:
  std::vector<int64_t> ring_sizes_;
  std::vector<Run> runs_;
};

}  // namespace dlo
