// A child process that cannot outlive its owner.
//
//   ASSIGN_OR_RETURN(WorkerProcess process,
//                    WorkerProcess::Spawn({.binary = "/opt/dlo/bin/dlo-worker", .link_fd = fd}));
//   poll(process.pidfd()) ...;
//   std::optional<ExitStatus> exit = process.TryWait();
//
// The child gets a small environment, /dev/null as standard input, the caller's standard output and
// error, the link as descriptor 3, rendezvous and flight recorder as 4 and 5, and no other
// descriptor, its own process group (a terminal's Ctrl-C is the server's to handle), and dies with
// the *thread* that spawned it (PR_SET_PDEATHSIG), so that thread has to stay. Move-only;
// destruction kills and reaps. One thread at a time.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace dlo {

inline constexpr int kWorkerLinkFd = 3;
inline constexpr int kWorkerRendezvousFd = 4;
inline constexpr int kWorkerRecorderFd = 5;

struct WorkerCommand {
  std::filesystem::path binary;
  std::vector<std::string> arguments;         // without the program's name
  int link_fd = -1;                           // becomes kWorkerLinkFd; stays the caller's here
  int rendezvous_fd = -1;                     // if any, the same for kWorkerRendezvousFd
  std::vector<std::string> environment = {};  // "NAME=value", in the place of what is passed on
  std::vector<int> cores = {};                // that it may run on; empty: those of the caller
  int recorder_fd = -1;  // becomes kWorkerRecorderFd; stays the caller's here; -1: none
};

struct ExitStatus {
  std::optional<int> signal;
  std::optional<int> exit_code;

  std::string ToString() const;  // "exited with code 1", "was killed by signal 9 (Killed)"
};

class WorkerProcess {
 public:
  // NOT_FOUND or PERMISSION_DENIED with the path when it cannot be executed.
  static absl::StatusOr<WorkerProcess> Spawn(const WorkerCommand& command);

  WorkerProcess(WorkerProcess&& other) noexcept;
  WorkerProcess& operator=(WorkerProcess&& other) noexcept;
  ~WorkerProcess();

  pid_t pid() const { return pid_; }
  int pidfd() const { return pidfd_; }  // readable once the process has ended

  void Signal(int signal);
  // The exit status once the process has ended; it is reaped by then.
  std::optional<ExitStatus> TryWait();

 private:
  WorkerProcess(pid_t pid, int pidfd) : pid_(pid), pidfd_(pidfd) {}
  void KillAndReap();

  pid_t pid_ = -1;  // -1: reaped or moved from
  int pidfd_ = -1;
};

// `environment` with `overrides` in it; both hold entries "NAME=value".
std::vector<std::string> WithOverrides(std::vector<std::string> environment,
                                       const std::vector<std::string>& overrides);

// What of `environment` (entries "NAME=value") a worker gets: paths, locale and temporary folder,
// the loader's and allocators' settings, and those of CUDA, NCCL, OpenMP and torch. No proxies and
// no credentials. OMP_WAIT_POLICY is passive and TORCH_CPP_LOG_LEVEL is FATAL unless they are set.
std::vector<std::string> WorkerEnvironment(char** environment);

}  // namespace dlo
