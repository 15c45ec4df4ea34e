#include "server/worker_process.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <thread>

#include "absl/strings/str_split.h"
#include "base/flight_recorder.h"

namespace dlo {
namespace {

using testing::HasSubstr;
using testing::Not;

class WorkerProcessTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends_.data()), 0);
  }
  void TearDown() override {
    close(ends_[0]);
    if (ends_[1] >= 0) close(ends_[1]);
  }

  absl::StatusOr<WorkerProcess> Shell(const std::string& script) {
    absl::StatusOr<WorkerProcess> process =
        WorkerProcess::Spawn({"/bin/sh", {"-c", script}, ends_[1]});
    close(std::exchange(ends_[1], -1));
    return process;
  }

  // All that the child wrote to its link.
  std::string ReadLink() {
    std::string text;
    char buffer[4096];
    for (ssize_t n; (n = read(ends_[0], buffer, sizeof(buffer))) > 0;) text.append(buffer, n);
    return text;
  }

  static ExitStatus WaitExit(WorkerProcess& process) {
    pollfd fd = {process.pidfd(), POLLIN, 0};
    EXPECT_EQ(poll(&fd, 1, 20'000), 1);
    return process.TryWait().value_or(ExitStatus{});
  }

  std::array<int, 2> ends_;
};

TEST_F(WorkerProcessTest, TheChildHasTheLinkItsEnvironmentAndNoOtherDescriptor) {
  setenv("AWS_SECRET_ACCESS_KEY", "secret", 1);
  setenv("http_proxy", "proxy", 1);
  setenv("OMP_NUM_THREADS", "3", 1);
  // One that lacks close-on-exec, as a careless library leaves it.
  const int leak = open("/dev/zero", O_RDONLY);
  absl::StatusOr<WorkerProcess> process = Shell("env >&3; ls -l /proc/self/fd >&3; cat; exit 5");
  ASSERT_TRUE(process.ok()) << process.status();
  const std::string text = ReadLink();
  EXPECT_THAT(text, HasSubstr("OMP_NUM_THREADS=3"));
  EXPECT_THAT(text, Not(HasSubstr("secret")));
  EXPECT_THAT(text, Not(HasSubstr("proxy")));
  EXPECT_THAT(text, HasSubstr("0 -> /dev/null"));
  EXPECT_THAT(text, Not(HasSubstr("/dev/zero")));
  EXPECT_EQ(WaitExit(*process).ToString(), "exited with code 5");
  close(leak);
}

TEST_F(WorkerProcessTest, TheChildHasTheCoresAndTheEnvironmentThatItWasGiven) {
  setenv("OMP_NUM_THREADS", "3", 1);
  const int core = sched_getcpu();
  absl::StatusOr<WorkerProcess> process = WorkerProcess::Spawn(
      {.binary = "/bin/sh",
       .arguments = {"-c", "env >&3; grep Cpus_allowed_list /proc/self/status >&3"},
       .link_fd = ends_[1],
       .environment = {"OMP_NUM_THREADS=7", "CUDA_VISIBLE_DEVICES=5"},
       .cores = {core}});
  close(std::exchange(ends_[1], -1));
  ASSERT_TRUE(process.ok()) << process.status();
  const std::string text = ReadLink();
  EXPECT_THAT(text, HasSubstr("OMP_NUM_THREADS=7"));
  EXPECT_THAT(text, Not(HasSubstr("OMP_NUM_THREADS=3")));
  EXPECT_THAT(text, HasSubstr("CUDA_VISIBLE_DEVICES=5"));
  EXPECT_THAT(text, HasSubstr("Cpus_allowed_list:\t" + std::to_string(core) + "\n"));
  EXPECT_EQ(WaitExit(*process).exit_code, 0);
}

TEST_F(WorkerProcessTest, TheChildHasTheFlightRecorder) {
  const absl::StatusOr<FlightMemory> memory = FlightMemory::Create();
  ASSERT_TRUE(memory.ok()) << memory.status();
  absl::StatusOr<WorkerProcess> process =
      WorkerProcess::Spawn({.binary = "/bin/sh",
                            .arguments = {"-c", "ls -l /proc/self/fd >&3"},
                            .link_fd = ends_[1],
                            .recorder_fd = memory->fd()});
  close(std::exchange(ends_[1], -1));
  ASSERT_TRUE(process.ok()) << process.status();
  EXPECT_THAT(ReadLink(), HasSubstr("5 -> /memfd:dlo-flight"));
  EXPECT_EQ(WaitExit(*process).exit_code, 0);
}

TEST_F(WorkerProcessTest, TheChildHasItsOwnProcessGroupAndDefaultSignals) {
  signal(SIGPIPE, SIG_IGN);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  absl::StatusOr<WorkerProcess> process =
      Shell("grep -E 'SigBlk|SigIgn' /proc/self/status >&3; cut -d' ' -f5 /proc/$$/stat >&3");
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ASSERT_TRUE(process.ok()) << process.status();
  const int pid = process->pid();
  const std::string text = ReadLink();
  EXPECT_THAT(text, HasSubstr("SigBlk:\t0000000000000000"));
  EXPECT_THAT(text, HasSubstr("SigIgn:\t0000000000000000"));
  EXPECT_THAT(text, HasSubstr(std::to_string(pid)));
  EXPECT_EQ(WaitExit(*process).exit_code, 0);
}

TEST_F(WorkerProcessTest, ASignalIsTold) {
  absl::StatusOr<WorkerProcess> process = Shell("kill -9 $$");
  ASSERT_TRUE(process.ok()) << process.status();
  EXPECT_EQ(WaitExit(*process).ToString(), "was killed by signal 9 (Killed)");
}

TEST_F(WorkerProcessTest, DestructionKillsAndReaps) {
  pid_t pid;
  {
    absl::StatusOr<WorkerProcess> process = Shell("exec sleep 1000");
    ASSERT_TRUE(process.ok()) << process.status();
    pid = process->pid();
  }
  EXPECT_EQ(kill(pid, 0), -1);
  EXPECT_EQ(errno, ESRCH);
}

TEST_F(WorkerProcessTest, TheChildDiesWithTheThreadThatSpawnedIt) {
  std::optional<WorkerProcess> kept;
  std::thread([&] {
    absl::StatusOr<WorkerProcess> process = Shell("exec sleep 1000");
    if (process.ok()) kept.emplace(*std::move(process));
  }).join();
  ASSERT_TRUE(kept);
  EXPECT_EQ(WaitExit(*kept).signal, SIGKILL);
}

TEST_F(WorkerProcessTest, ABinaryThatCannotRunIsNamed) {
  const absl::StatusOr<WorkerProcess> missing =
      WorkerProcess::Spawn({"/nowhere/dlo-worker", {}, ends_[1]});
  EXPECT_TRUE(absl::IsNotFound(missing.status())) << missing.status();
  EXPECT_THAT(missing.status().message(), HasSubstr("/nowhere/dlo-worker"));
  const absl::StatusOr<WorkerProcess> not_executable =
      WorkerProcess::Spawn({"/etc/passwd", {}, ends_[1]});
  EXPECT_TRUE(absl::IsPermissionDenied(not_executable.status())) << not_executable.status();
}

TEST(WorkerEnvironment, PassesWhatComputingNeedsAndNoSecrets) {
  char path[] = "PATH=/bin", omp[] = "OMP_NUM_THREADS=3", token[] = "HF_TOKEN=secret",
       proxy[] = "https_proxy=x";
  char* environment[] = {path, omp, token, proxy, nullptr};
  EXPECT_THAT(
      WorkerEnvironment(environment),
      testing::UnorderedElementsAre("PATH=/bin", "OMP_NUM_THREADS=3", "OMP_WAIT_POLICY=passive",
                                    "TORCH_CPP_LOG_LEVEL=FATAL"));
  char policy[] = "OMP_WAIT_POLICY=active", level[] = "TORCH_CPP_LOG_LEVEL=INFO";
  char* chosen[] = {policy, level, nullptr};
  EXPECT_THAT(WorkerEnvironment(chosen),
              testing::ElementsAre("OMP_WAIT_POLICY=active", "TORCH_CPP_LOG_LEVEL=INFO"));
}

}  // namespace
}  // namespace dlo
