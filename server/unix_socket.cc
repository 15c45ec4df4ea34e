#include "server/unix_socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace dlo {

absl::Status CheckSocketFree(const std::string& path) {
  sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = {}};
  if (path.size() >= sizeof(address.sun_path))
    return absl::OkStatus();  // refused by whoever binds it
  std::memcpy(address.sun_path, path.c_str(), path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return absl::OkStatus();
  const absl::Cleanup close_fd = [fd] { close(fd); };
  // A full backlog (EAGAIN) is somebody's, too.
  const bool answered =
      connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ||
      errno == EAGAIN;
  if (!answered) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("cannot listen on unix:", path, " (another server is running there)"));
}

}  // namespace dlo
