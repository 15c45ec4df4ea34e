#include "tests/support/net_namespaces.h"

#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace dlo {
namespace {

absl::Status Command(const std::string& command) {
  const int status = system(command.c_str());
  if (status == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("\"", command, "\" ended with ", status));
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  const bool written =
      fd >= 0 && write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  const int error = errno;
  if (fd >= 0) close(fd);
  return written ? absl::OkStatus() : absl::ErrnoToStatus(error, path);
}

}  // namespace

absl::Status EnterNetNamespace() {
  if (unshare(CLONE_NEWNET) != 0) {
    const uid_t uid = getuid();
    const gid_t gid = getgid();
    if (unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) {
      return absl::ErrnoToStatus(
          errno,
          "this test needs network namespaces (CAP_SYS_ADMIN, or unprivileged user namespaces)");
    }
    RETURN_IF_ERROR(WriteFile("/proc/self/setgroups", "deny"));
    RETURN_IF_ERROR(WriteFile("/proc/self/uid_map", absl::StrCat("0 ", uid, " 1")));
    RETURN_IF_ERROR(WriteFile("/proc/self/gid_map", absl::StrCat("0 ", gid, " 1")));
  }
  return Command("ip link set lo up");
}

absl::StatusOr<std::unique_ptr<TwoHosts>> TwoHosts::Create() {
  int ready[2];
  int done[2];
  if (pipe2(ready, O_CLOEXEC) != 0 || pipe2(done, O_CLOEXEC) != 0) {
    return absl::ErrnoToStatus(errno, "pipe2");
  }
  // A process that makes the namespace and stays until we have hold of it.
  const pid_t maker = fork();
  if (maker < 0) return absl::ErrnoToStatus(errno, "fork");
  if (maker == 0) {
    char byte = unshare(CLONE_NEWNET) == 0 ? 1 : 0;
    close(done[1]);
    if (write(ready[1], &byte, 1) != 1 || read(done[0], &byte, 1) != 0) _exit(1);
    _exit(0);
  }
  char made = 0;
  const ssize_t bytes = read(ready[0], &made, 1);
  const int other = bytes == 1 && made == 1 ? open(absl::StrCat("/proc/", maker, "/ns/net").c_str(),
                                                   O_RDONLY | O_CLOEXEC)
                                            : -1;
  for (int fd : {ready[0], ready[1], done[0], done[1]}) close(fd);
  while (waitpid(maker, nullptr, 0) < 0 && errno == EINTR) {
  }
  if (other < 0) {
    return absl::FailedPreconditionError("the other host has no network namespace");
  }
  auto hosts = std::unique_ptr<TwoHosts>(new TwoHosts(other));
  for (const std::string& command :
       {hosts->InOther(
            absl::StrCat("ip link add dlo-b type veth peer name dlo-a netns ", getpid())),
        absl::StrCat("ip addr add ", kHere, "/24 dev dlo-a"), std::string("ip link set dlo-a up"),
        hosts->InOther("ip link set lo up"),
        hosts->InOther(absl::StrCat("ip addr add ", kOther, "/24 dev dlo-b")),
        hosts->InOther("ip link set dlo-b up")}) {
    RETURN_IF_ERROR(Command(command));
  }
  return hosts;
}

TwoHosts::~TwoHosts() {
  (void)Command("ip link del dlo-a 2>/dev/null");
  close(other_);
}

std::string TwoHosts::OtherNamespace() const {
  return absl::StrCat("--net=/proc/", getpid(), "/fd/", other_);
}

std::string TwoHosts::InOther(const std::string& command) const {
  return absl::StrCat("nsenter ", OtherNamespace(), " ", command);
}

std::vector<std::string> TwoHosts::OnOther(std::vector<std::string> argv) const {
  std::vector<std::string> all = {"/usr/bin/nsenter", OtherNamespace(), "--"};
  all.insert(all.end(), argv.begin(), argv.end());
  return all;
}

absl::Status TwoHosts::Cut() { return Command("ip link set dlo-a down"); }
absl::Status TwoHosts::Restore() { return Command("ip link set dlo-a up"); }

}  // namespace dlo
