// What a command talks to: its input and outputs, and Ctrl-C. A test replaces both.
#pragma once

#include <functional>
#include <istream>
#include <ostream>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace dlo {

struct Console {
  std::istream* in = nullptr;
  std::ostream* out = nullptr;  // results, for other programs
  std::ostream* err = nullptr;  // progress and errors, for people
  // Columns of the terminal behind `err`, asked before each redraw. Empty: `err` is not a terminal.
  std::function<int()> columns;
};

// The wish to stop, once. Thread-safe.
class Interrupt {
 public:
  // Calls the subscriber. Only the first call counts.
  void Trigger(int signal);

  // The signal, or 0.
  int signal() const;

  // Waits at most `timeout`; true if triggered.
  bool WaitFor(absl::Duration timeout) const;

  // `callback` runs on the triggering thread, or at once if that has happened; not after
  // Unsubscribe has returned. One at a time.
  void Subscribe(std::function<void()> callback);
  void Unsubscribe();

 private:
  mutable absl::Mutex mu_;
  int signal_ ABSL_GUARDED_BY(mu_) = 0;
  std::function<void()> callback_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dlo
