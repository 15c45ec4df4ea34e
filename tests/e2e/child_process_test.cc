#include "tests/e2e/child_process.h"

#include <csignal>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dlo {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<ChildProcess> Shell(const std::string& script) {
  return *ChildProcess::Start({"/bin/sh", "-c", script}, {"GREETING=hello"});
}

TEST(ChildProcess, GivesOutputAndExitCode) {
  auto process = Shell("echo $GREETING; echo there >&2; exit 3");
  EXPECT_EQ(*process->Wait(absl::Seconds(10)), 3);
  EXPECT_EQ(process->output(), "hello\nthere\n");
}

TEST(ChildProcess, FindsALineWhileTheProgramRuns) {
  auto process = Shell("echo one; echo serving on here; exec sleep 100");
  EXPECT_EQ(*process->WaitForLine("serving on", absl::Seconds(10)), "serving on here");
  process->Signal(SIGKILL);
  EXPECT_EQ(*process->Wait(absl::Seconds(10)), 128 + SIGKILL);
}

TEST(ChildProcess, SaysWhatAProgramWroteInsteadOfTheLine) {
  auto process = Shell("echo cannot start");
  const absl::Status status = process->WaitForLine("serving on", absl::Seconds(10)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cannot start"));
}

TEST(ChildProcess, GivesUpAtTheDeadline) {
  auto process = Shell("exec sleep 100");
  EXPECT_EQ(process->WaitForLine("x", absl::Milliseconds(20)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(process->Wait(absl::Milliseconds(20)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST(ChildProcess, IsGoneWithItsOwner) {
  auto process = Shell("exec sleep 100");
  const pid_t pid = process->pid();
  process.reset();
  EXPECT_NE(kill(pid, 0), 0);
}

TEST(ChildProcess, NamesAProgramThatIsNotThere) {
  EXPECT_THAT(ChildProcess::Start({"/no/such/program"}).status().ToString(), HasSubstr("/no/such"));
}

}  // namespace
}  // namespace dlo
