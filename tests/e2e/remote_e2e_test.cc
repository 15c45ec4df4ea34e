// The real programs over two network namespaces: dlo-serve here, dlo-worker with the demo model on
// the other host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/e2e/child_process.h"
#include "tests/support/net_namespaces.h"
#include "tests/support/test_certificates.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

constexpr absl::Duration kTimeout = absl::Seconds(120);

class RemoteE2eTest : public testing::Test {
 protected:
  RemoteE2eTest() {
    std::string pattern = (fs::temp_directory_path() / "remote-e2e-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~RemoteE2eTest() override { fs::remove_all(folder_); }

  static std::string Binary(const std::string& name) {
    return std::string(DLO_BINARY_DIR) + "/bin/" + name;
  }
  std::string Path(const std::string& name) const { return (folder_ / name).string(); }

  std::unique_ptr<ChildProcess> Serve(const std::string& name, std::vector<std::string> more) {
    std::vector<std::string> argv = {
        Binary("dlo-serve"), "--config=" + std::string(DLO_SOURCE_DIR) + "/configs/shapes.yaml",
        "--listen=unix:" + Path(name + ".sock"), "--data-dir=" + Path(name + ".data"),
        "--threads=1"};
    argv.insert(argv.end(), more.begin(), more.end());
    auto serve = ChildProcess::Start(argv);
    EXPECT_TRUE(serve.ok()) << serve.status();
    return *std::move(serve);
  }

  std::string Generate(const std::string& server) {
    const std::string file = Path(server + ".safetensors");
    auto client = ChildProcess::Start(
        {Binary("dlo-client"), "generate", "--endpoint=unix:" + Path(server + ".sock"), "--prompt",
         "a red circle moving right", "--seed=1", "--steps=2", "--output=" + file});
    EXPECT_TRUE(client.ok()) << client.status();
    const auto code = (*client)->Wait(kTimeout);
    EXPECT_EQ(code.value_or(-1), 0) << (*client)->output();
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }

  fs::path folder_;
};

TEST_F(RemoteE2eTest, AWorkerOnAnotherHostMakesTheVideoOfALocalOne) {
  std::string expected;
  {
    const auto local = Serve("local", {});
    ASSERT_TRUE(local->WaitForLine("serving on ", kTimeout).ok());
    expected = Generate("local");
    local->Signal(SIGTERM);
    EXPECT_EQ(local->Wait(kTimeout).value_or(-1), 0) << local->output();
  }
  ASSERT_FALSE(expected.empty());

  auto hosts = TwoHosts::Create();
  ASSERT_TRUE(hosts.ok()) << hosts.status();
  const auto ca = TestCa::Create(folder_ / "ca");
  ASSERT_TRUE(ca.ok()) << ca.status();
  const auto server = ca->Issue("server", absl::StrCat("IP:", TwoHosts::kHere));
  const auto client = ca->Issue("worker", "DNS:worker");
  ASSERT_TRUE(server.ok() && client.ok());
  const std::string address = absl::StrCat(TwoHosts::kHere, ":7070");
  const auto serve = Serve(
      "remote", {"--remote-ranks=1", "--worker-listen=" + address, "--worker-tls-ca=" + server->ca,
                 "--worker-tls-cert=" + server->cert, "--worker-tls-key=" + server->key});
  ASSERT_TRUE(serve->WaitForLine("rank 0: waiting for its worker", kTimeout).ok());
  // What it needs to know of the model comes from the server.
  const auto worker = ChildProcess::Start((*hosts)->OnOther(
      {Binary("dlo-worker"), "--connect=" + address, "--rank=0", "--tls-ca=" + client->ca,
       "--tls-cert=" + client->cert, "--tls-key=" + client->key, "--threads=1",
       "--recorder=" + Path("recorder")}));
  ASSERT_TRUE(worker.ok()) << worker.status();
  const auto serving = serve->WaitForLine("serving on ", kTimeout);
  ASSERT_TRUE(serving.ok()) << serving.status() << (*worker)->output();
  EXPECT_TRUE(Generate("remote") == expected);

  (*worker)->Signal(SIGKILL);
  EXPECT_EQ((*worker)->Wait(kTimeout).value_or(-1), 128 + SIGKILL);
  EXPECT_TRUE(serve->WaitForLine("lost its link, from another host", kTimeout).ok());
  auto print = ChildProcess::Start({Binary("dlo-worker"), "--print-recorder=" + Path("recorder")});
  ASSERT_TRUE(print.ok()) << print.status();
  EXPECT_EQ((*print)->Wait(kTimeout).value_or(-1), 0);
  EXPECT_THAT((*print)->output(), AllOf(HasSubstr("loading  (no wave)  done after "),
                                        HasSubstr("stage text  (wave 1, text)  done after "),
                                        HasSubstr("step 2  (wave 1, denoise, step 2)  done after "),
                                        HasSubstr("stage decode"), HasSubstr("sending")));
  // Without its worker it waits, and stops when asked to.
  serve->Signal(SIGTERM);
  EXPECT_EQ(serve->Wait(kTimeout).value_or(-1), 0) << serve->output();
}

}  // namespace
}  // namespace dlo

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (const absl::Status status = dlo::EnterNetNamespace(); !status.ok()) {
    std::cerr << status << std::endl;
    return 1;
  }
  return RUN_ALL_TESTS();
}
