#include "server/worker_process.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace dlo {
namespace {

constexpr std::array<absl::string_view, 6> kPassedNames = {"PATH", "HOME",   "LANG",
                                                           "TZ",   "TMPDIR", "GLIBC_TUNABLES"};
constexpr std::array<absl::string_view, 15> kPassedPrefixes = {
    "LC_",   "LD_",  "MALLOC_", "CUDA_",  "NVIDIA_", "NCCL_", "GLOO_", "OMP_",
    "GOMP_", "KMP_", "MKL_",    "TORCH_", "ASAN_",   "TSAN_", "UBSAN_"};

constexpr std::array<std::pair<absl::string_view, absl::string_view>, 2> kDefaults = {{
    // Idle OpenMP threads spin by default, which on cores shared with anything else (another rank,
    // an encoder) makes a request several times as slow. Sleeping costs a wake-up per parallel
    // loop.
    {"OMP_WAIT_POLICY", "passive"},
    // Else libtorch prints a stack for every connection that the death of a peer breaks. What goes
    // wrong comes as an exception all the same.
    {"TORCH_CPP_LOG_LEVEL", "FATAL"},
}};

// The header of glibc 2.36 declares pidfd_open with C++ linkage.
int PidfdOpen(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& string : strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

// After fork, in a process that had other threads: only async-signal-safe calls. Returns only on
// failure, with errno set.
void ExecChild(const char* binary, char** argv, char** envp, const WorkerCommand& command,
               int error_fd, const cpu_set_t* cores, pid_t parent) {
  setpgid(0, 0);
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return;
  // The parent may have died before prctl.
  if (getppid() != parent) _exit(1);
  if (cores != nullptr && sched_setaffinity(0, sizeof(*cores), cores) != 0) return;
  for (int signal = 1; signal < NSIG; ++signal) ::signal(signal, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  const int null = open("/dev/null", O_RDONLY);
  if (null < 0 || dup2(null, STDIN_FILENO) < 0) return;
  // The worker's descriptors are the first ones, whatever of ours lives there; all move out of the
  // way first.
  const int error_copy = fcntl(error_fd, F_DUPFD_CLOEXEC, 10);
  if (error_copy < 0) return;
  const std::array<std::pair<int, int>, 3> own = {{{command.link_fd, kWorkerLinkFd},
                                                   {command.rendezvous_fd, kWorkerRendezvousFd},
                                                   {command.recorder_fd, kWorkerRecorderFd}}};
  std::array<int, own.size()> copies;
  for (size_t i = 0; i < own.size(); ++i) {
    copies[i] = own[i].first < 0 ? -1 : fcntl(own[i].first, F_DUPFD_CLOEXEC, 10);
    if (own[i].first >= 0 && copies[i] < 0) return;
  }
  close_range(kWorkerLinkFd, ~0U, CLOSE_RANGE_CLOEXEC);
  for (size_t i = 0; i < own.size(); ++i) {
    if (copies[i] >= 0 && dup2(copies[i], own[i].second) < 0) return;
  }
  execve(binary, argv, envp);
  const int error = errno;
  if (write(error_copy, &error, sizeof(error)) < 0) _exit(126);
  _exit(127);
}

}  // namespace

std::string ExitStatus::ToString() const {
  if (signal) return absl::StrCat("was killed by signal ", *signal, " (", strsignal(*signal), ")");
  return absl::StrCat("exited with code ", exit_code.value_or(-1));
}

absl::StatusOr<WorkerProcess> WorkerProcess::Spawn(const WorkerCommand& command) {
  std::string binary = command.binary.string();
  std::vector<std::string> arguments = command.arguments;
  arguments.insert(arguments.begin(), binary);
  std::vector<std::string> environment =
      WithOverrides(WorkerEnvironment(environ), command.environment);
  std::vector<char*> argv = Pointers(arguments);
  std::vector<char*> envp = Pointers(environment);

  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (int core : command.cores) {
    if (core < CPU_SETSIZE) CPU_SET(core, &cores);
  }

  int error_pipe[2];
  if (pipe2(error_pipe, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "pipe2");
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    ExecChild(binary.c_str(), argv.data(), envp.data(), command, error_pipe[1],
              command.cores.empty() ? nullptr : &cores, parent);
    const int error = errno;
    if (write(error_pipe[1], &error, sizeof(error)) < 0) _exit(126);
    _exit(127);
  }
  const int fork_error = errno;
  close(error_pipe[1]);
  absl::Cleanup close_pipe = [&] { close(error_pipe[0]); };
  if (pid < 0) return absl::ErrnoToStatus(fork_error, "fork");
  WorkerProcess process(pid, PidfdOpen(pid));
  if (process.pidfd_ < 0) return absl::ErrnoToStatus(errno, "pidfd_open");
  int error = 0;
  ssize_t bytes;
  do {
    bytes = read(error_pipe[0], &error, sizeof(error));
  } while (bytes < 0 && errno == EINTR);
  if (bytes == sizeof(error)) {
    return absl::ErrnoToStatus(error, absl::StrCat("could not be started from ", binary));
  }
  return process;
}

WorkerProcess::WorkerProcess(WorkerProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), pidfd_(std::exchange(other.pidfd_, -1)) {}

WorkerProcess& WorkerProcess::operator=(WorkerProcess&& other) noexcept {
  if (this != &other) {
    KillAndReap();
    pid_ = std::exchange(other.pid_, -1);
    pidfd_ = std::exchange(other.pidfd_, -1);
  }
  return *this;
}

WorkerProcess::~WorkerProcess() { KillAndReap(); }

void WorkerProcess::Signal(int signal) {
  if (pid_ > 0) kill(pid_, signal);
}

std::optional<ExitStatus> WorkerProcess::TryWait() {
  if (pid_ <= 0) return std::nullopt;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return std::nullopt;
  pid_ = -1;
  ExitStatus exit;
  if (WIFSIGNALED(status)) {
    exit.signal = WTERMSIG(status);
  } else {
    exit.exit_code = WEXITSTATUS(status);
  }
  return exit;
}

void WorkerProcess::KillAndReap() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
  }
  if (pidfd_ >= 0) close(std::exchange(pidfd_, -1));
}

std::vector<std::string> WithOverrides(std::vector<std::string> environment,
                                       const std::vector<std::string>& overrides) {
  for (const std::string& entry : overrides) {
    const std::string name = entry.substr(0, entry.find('=') + 1);
    environment.erase(
        std::remove_if(environment.begin(), environment.end(),
                       [&](const std::string& other) { return absl::StartsWith(other, name); }),
        environment.end());
    environment.push_back(entry);
  }
  return environment;
}

std::vector<std::string> WorkerEnvironment(char** environment) {
  std::vector<std::string> passed;
  for (char** entry = environment; *entry != nullptr; ++entry) {
    const absl::string_view text = *entry;
    const absl::string_view name = text.substr(0, text.find('='));
    const bool wanted =
        std::find(kPassedNames.begin(), kPassedNames.end(), name) != kPassedNames.end() ||
        std::any_of(kPassedPrefixes.begin(), kPassedPrefixes.end(),
                    [&](absl::string_view prefix) { return absl::StartsWith(name, prefix); });
    if (wanted) passed.emplace_back(text);
  }
  for (const auto& [name, value] : kDefaults) {
    const bool chosen = std::any_of(passed.begin(), passed.end(), [name = name](const auto& entry) {
      return absl::StartsWith(entry, absl::StrCat(name, "="));
    });
    if (!chosen) passed.push_back(absl::StrCat(name, "=", value));
  }
  return passed;
}

}  // namespace dlo
