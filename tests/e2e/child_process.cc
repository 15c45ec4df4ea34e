#include "tests/e2e/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace dlo {
namespace {

constexpr absl::Duration kGrace = absl::Seconds(10);

int MillisecondsUntil(absl::Time deadline) {
  const int64_t ms =
      absl::ToInt64Milliseconds(absl::Ceil(deadline - absl::Now(), absl::Milliseconds(1)));
  return static_cast<int>(std::clamp<int64_t>(ms, 0, 1 << 30));
}

std::vector<char*> Pointers(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (const std::string& s : strings) pointers.push_back(const_cast<char*>(s.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(
    const std::vector<std::string>& argv, const std::vector<std::string>& environment) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "pipe2");
  std::vector<std::string> all_environment = environment;
  for (char** e = environ; *e != nullptr; ++e) all_environment.emplace_back(*e);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, fds[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, fds[1], STDERR_FILENO);
  pid_t pid = -1;
  const int error = posix_spawn(&pid, argv[0].c_str(), &actions, nullptr, Pointers(argv).data(),
                                Pointers(all_environment).data());
  posix_spawn_file_actions_destroy(&actions);
  close(fds[1]);
  if (error != 0) {
    close(fds[0]);
    return absl::ErrnoToStatus(error, argv[0]);
  }
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  return std::unique_ptr<ChildProcess>(new ChildProcess(pid, pidfd, fds[0]));
}

ChildProcess::~ChildProcess() {
  Signal(SIGTERM);
  if (!Wait(kGrace).ok()) {
    Signal(SIGKILL);
    Wait(absl::InfiniteDuration()).IgnoreError();
  }
  close(output_fd_);
  close(pidfd_);
}

void ChildProcess::Signal(int signal) {
  if (!reaped_) kill(pid_, signal);
}

absl::StatusOr<std::string> ChildProcess::WaitForLine(absl::string_view text,
                                                      absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  size_t line = 0;
  for (;;) {
    for (size_t end; (end = output_.find('\n', line)) != std::string::npos; line = end + 1) {
      std::string candidate = output_.substr(line, end - line);
      if (absl::StrContains(candidate, text)) return candidate;
    }
    if (ReadSome(deadline)) continue;
    if (output_ended_)
      return Failure(absl::StatusCode::kFailedPrecondition,
                     absl::StrCat("ended without writing \"", text, "\""));
    return Failure(absl::StatusCode::kDeadlineExceeded,
                   absl::StrCat("has not written \"", text, "\""));
  }
}

absl::StatusOr<int> ChildProcess::Wait(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (ReadSome(deadline)) {
  }
  pollfd exit = {.fd = pidfd_, .events = POLLIN};
  if (!reaped_ && poll(&exit, 1, MillisecondsUntil(deadline)) <= 0) {
    return Failure(absl::StatusCode::kDeadlineExceeded, "has not ended");
  }
  if (!reaped_) {
    int status = 0;
    waitpid(pid_, &status, 0);
    reaped_ = true;
    exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  return exit_code_;
}

bool ChildProcess::ReadSome(absl::Time deadline) {
  if (output_ended_) return false;
  pollfd output = {.fd = output_fd_, .events = POLLIN};
  if (poll(&output, 1, MillisecondsUntil(deadline)) <= 0) return false;
  char buffer[4096];
  const ssize_t n = read(output_fd_, buffer, sizeof(buffer));
  if (n <= 0) {
    output_ended_ = true;
    return false;
  }
  output_.append(buffer, static_cast<size_t>(n));
  return true;
}

absl::Status ChildProcess::Failure(absl::StatusCode code, absl::string_view what) const {
  return absl::Status(code, absl::StrCat("process ", pid_, " ", what, "; it wrote:\n", output_));
}

}  // namespace dlo
