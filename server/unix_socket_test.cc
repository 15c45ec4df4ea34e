#include "server/unix_socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dlo {
namespace {

TEST(CheckSocketFree, RefusesAPathOnWhichSomebodyListensAndNoOther) {
  std::string dir = "/tmp/dlo_socket_XXXXXX";
  ASSERT_NE(mkdtemp(dir.data()), nullptr);
  const std::string path = dir + "/api.sock";
  EXPECT_TRUE(CheckSocketFree(path).ok());  // no file

  sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = {}};
  std::memcpy(address.sun_path, path.c_str(), path.size());
  const int server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(bind(server, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(server, 1), 0);
  EXPECT_EQ(CheckSocketFree(path).code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(CheckSocketFree(path).message(), testing::HasSubstr(path));

  close(server);
  EXPECT_TRUE(CheckSocketFree(path).ok());  // a dead server's file
  std::filesystem::remove_all(dir);
}

}  // namespace
}  // namespace dlo
