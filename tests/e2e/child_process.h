// Runs a program of ours in a test: its output, its lines as they come, its exit code.
//
//   ASSIGN_OR_RETURN(auto serve,
//                    ChildProcess::Start({"bin/dlo-serve", "--listen", "127.0.0.1:0"}));
//   ASSIGN_OR_RETURN(std::string line, serve->WaitForLine("serving on ", absl::Seconds(30)));
//   serve->Signal(SIGTERM);
//   ASSIGN_OR_RETURN(int code, serve->Wait(absl::Seconds(30)));
//
// Standard output and error come together. The destructor ends the process (TERM, after ten seconds
// KILL) and reaps it. One thread at a time. Errors are DEADLINE_EXCEEDED or FAILED_PRECONDITION
// with all that the program wrote.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace dlo {

class ChildProcess {
 public:
  // argv[0] is a path. `environment` adds to this process's own, as NAME=value.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(
      const std::vector<std::string>& argv, const std::vector<std::string>& environment = {});
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  void Signal(int signal);

  // The first whole line so far, or to come, that contains `text`.
  absl::StatusOr<std::string> WaitForLine(absl::string_view text, absl::Duration timeout);

  // The exit code, or 128 + the signal that ended it. May be called again.
  absl::StatusOr<int> Wait(absl::Duration timeout);

  // All that was read so far; complete after Wait.
  const std::string& output() const { return output_; }

 private:
  ChildProcess(pid_t pid, int pidfd, int output_fd)
      : pid_(pid), pidfd_(pidfd), output_fd_(output_fd) {}

  // Reads what there is, waiting for more until `deadline`. False at the end of the output or at
  // the deadline.
  bool ReadSome(absl::Time deadline);
  absl::Status Failure(absl::StatusCode code, absl::string_view what) const;

  pid_t pid_;
  int pidfd_;
  int output_fd_;
  std::string output_;
  bool output_ended_ = false;
  bool reaped_ = false;
  int exit_code_ = 0;
};

}  // namespace dlo
