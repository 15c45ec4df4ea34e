#include "server/bind_error.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>

#include "absl/strings/str_cat.h"

namespace dlo {
namespace {

TEST(BindErrorTest, IsTheOperatingSystemsReason) {
  sockaddr_in address = {.sin_family = AF_INET};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(fd, 1), 0);
  socklen_t size = sizeof(address);
  ASSERT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string taken = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  EXPECT_EQ(FindBindError(taken), "Address already in use");
  close(fd);
  EXPECT_EQ(FindBindError(taken), "");
  EXPECT_EQ(FindBindError("192.0.2.1:0"), "Cannot assign requested address");
  EXPECT_NE(FindBindError("no.such.host.invalid:1"), "");
}

TEST(BindErrorTest, AUnixSocketThatCouldBeBoundIsNotLeftBehind) {
  EXPECT_EQ(FindBindError("unix:/nowhere/at/all.sock"), "No such file or directory");
  const std::string path =
      std::filesystem::temp_directory_path() / absl::StrCat("bind-error-", getpid());
  EXPECT_EQ(FindBindError("unix:" + path), "");
  EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace dlo
