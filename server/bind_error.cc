#include "server/bind_error.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/strip.h"

namespace dlo {
namespace {

std::string TryBind(const sockaddr* address, socklen_t size) {
  const int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return strerror(errno);
  const absl::Cleanup close_fd = [fd] { close(fd); };
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd, address, size) != 0 || listen(fd, 1) != 0) return strerror(errno);
  return "";
}

std::string TryUnixPath(const std::string& path) {
  sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = {}};
  if (path.size() >= sizeof(address.sun_path)) return strerror(ENAMETOOLONG);
  std::memcpy(address.sun_path, path.c_str(), path.size());
  std::string error = TryBind(reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  if (error.empty()) unlink(path.c_str());
  return error;
}

}  // namespace

std::string FindBindError(const std::string& listen) {
  absl::string_view rest = listen;
  if (absl::ConsumePrefix(&rest, "unix:")) return TryUnixPath(std::string(rest));
  const size_t colon = listen.rfind(':');
  if (colon == std::string::npos) return "not HOST:PORT";
  absl::string_view host = rest.substr(0, colon);
  absl::ConsumePrefix(&host, "[");
  absl::ConsumeSuffix(&host, "]");
  const addrinfo hints = {.ai_flags = AI_PASSIVE, .ai_socktype = SOCK_STREAM};
  addrinfo* found = nullptr;
  const int code =
      getaddrinfo(std::string(host).c_str(), listen.substr(colon + 1).c_str(), &hints, &found);
  if (code != 0) return gai_strerror(code);
  const absl::Cleanup free_found = [found] { freeaddrinfo(found); };
  std::string error;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    error = TryBind(entry->ai_addr, entry->ai_addrlen);
    if (error.empty()) return "";
  }
  return error;
}

}  // namespace dlo
