// Workers on another host: two network namespaces, mutual TLS, real (scripted) worker processes.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <stdlib.h>

#include <filesystem>
#include <iostream>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/build_id.h"
#include "server/testing/frontend_harness.h"
#include "tests/e2e/child_process.h"
#include "tests/support/net_namespaces.h"
#include "tests/support/test_certificates.h"

namespace dlo {
namespace {

using grpc::StatusCode;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr absl::Duration kKeepalive = absl::Seconds(1);
constexpr int kExitCodeLinkLost = 3;

class MemorySink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  std::string text() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return text_;
  }

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    text_.append(message.payload.data(), message.payload.size());
    text_.push_back('\n');
  }
  void flush_() override {}

  std::string text_;
};

// What this process logs, which is what dlo-serve would.
class LogTap {
 public:
  LogTap() : before_(spdlog::default_logger()), sink_(std::make_shared<MemorySink>()) {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", sink_));
  }
  ~LogTap() { spdlog::set_default_logger(before_); }

  // Waits for a line with both texts.
  void WaitLine(const std::string& text, const std::string& other = "") {
    std::string log;
    for (const absl::Time end = absl::Now() + kTestTimeout; absl::Now() < end;) {
      log = sink_->text();
      std::istringstream lines(log);
      for (std::string line; std::getline(lines, line);) {
        if (line.find(text) != std::string::npos && line.find(other) != std::string::npos) return;
      }
      absl::SleepFor(absl::Milliseconds(5));
    }
    ADD_FAILURE() << "no line with \"" << text << "\" and \"" << other << "\" in:\n" << log;
  }
  std::string text() { return sink_->text(); }

 private:
  const std::shared_ptr<spdlog::logger> before_;
  const std::shared_ptr<MemorySink> sink_;
};

class RemoteWorkersTest : public testing::Test {
 protected:
  void SetUp() override {
    auto hosts = TwoHosts::Create();
    ASSERT_TRUE(hosts.ok()) << hosts.status();
    hosts_ = *std::move(hosts);
    std::string pattern = (std::filesystem::temp_directory_path() / "remote-test-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    const auto ca = TestCa::Create(folder_ / "ca");
    ASSERT_TRUE(ca.ok()) << ca.status();
    const auto server = ca->Issue("server", absl::StrCat("IP:", TwoHosts::kHere));
    ASSERT_TRUE(server.ok()) << server.status();
    const auto worker = ca->Issue("worker", "DNS:worker");
    ASSERT_TRUE(worker.ok()) << worker.status();
    server_tls_ = *server;
    worker_tls_ = *worker;
  }
  void TearDown() override {
    workers_.clear();
    harness_.reset();
    hosts_.reset();
    std::filesystem::remove_all(folder_);
  }

  // A frontend whose ranks `remote` are on the other host.
  void Start(std::vector<DispatchDomain> domains, std::vector<int> remote,
             std::vector<std::string> worker_arguments = {}) {
    harness_ = std::make_unique<FrontendHarness>(std::move(worker_arguments));
    FrontendOptions& options = harness_->options();
    options.domains = std::move(domains);
    options.scheduler.max_wait = absl::Seconds(20);
    options.supervisor.kill_grace = absl::Seconds(2);
    RemoteWorkers& workers = options.remote.emplace();
    workers.ranks = std::move(remote);
    workers.listen = absl::StrCat(TwoHosts::kHere, ":0");
    workers.keepalive = {kKeepalive, kKeepalive};
    const auto tls = LoadLinkTls(server_tls_);
    ASSERT_TRUE(tls.ok()) << tls.status();
    workers.tls = *tls;
    harness_->Start();
  }

  ChildProcess& StartWorker(int rank, std::vector<std::string> more = {}) {
    std::vector<std::string> argv = {
        std::string(DLO_BINARY_DIR) + "/tests/scripted-worker",
        "--connect=" + harness_->frontend().worker_address(),
        absl::StrCat("--rank=", rank),
        "--tls-ca=" + worker_tls_.ca,
        "--tls-cert=" + worker_tls_.cert,
        "--tls-key=" + worker_tls_.key,
        absl::StrCat("--keepalive-ms=", absl::ToInt64Milliseconds(kKeepalive))};
    argv.insert(argv.end(), more.begin(), more.end());
    auto worker = ChildProcess::Start(hosts_->OnOther(argv));
    EXPECT_TRUE(worker.ok()) << worker.status();
    workers_.push_back(*std::move(worker));
    return *workers_.back();
  }

  static void ExpectServed(TestCall& call) {
    const grpc::Status status = call.Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
  void ExpectServed(const std::string& prompt) {
    TestCall call(harness_->channel(), FrontendHarness::Request(prompt));
    ExpectServed(call);
  }

  // How an attachment ends that says Hello so.
  grpc::Status AttachAndFinish(const v1::Hello& hello,
                               const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
    const auto channel = grpc::CreateChannel(harness_->frontend().worker_address(), credentials);
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(10)));
    const auto stub = v1::WorkerLink::NewStub(channel);
    const auto stream = stub->Attach(&context);
    v1::FromWorker message;
    *message.mutable_hello() = hello;
    stream->Write(message);
    v1::ToWorker answer;
    while (stream->Read(&answer)) {
    }
    return stream->Finish();
  }
  std::shared_ptr<grpc::ChannelCredentials> Credentials(const LinkTlsFiles& files) {
    const auto tls = LoadLinkTls(files);
    EXPECT_TRUE(tls.ok()) << tls.status();
    return grpc::SslCredentials({tls->ca_pem, tls->key_pem, tls->cert_pem});
  }
  static v1::Hello HelloOf(int rank) {
    v1::Hello hello;
    hello.set_protocol_version(kLinkProtocolVersion);
    hello.set_build_id(BuildId());
    hello.set_rank(rank);
    return hello;
  }

  LogTap log_;
  std::unique_ptr<TwoHosts> hosts_;
  std::filesystem::path folder_;
  LinkTlsFiles server_tls_;
  LinkTlsFiles worker_tls_;
  std::unique_ptr<FrontendHarness> harness_;
  std::vector<std::unique_ptr<ChildProcess>> workers_;
};

TEST_F(RemoteWorkersTest, ServesOnceTheRemoteRankIsThereAndBothRunTheirRequests) {
  Start(JoinedReplicas(2), {1});
  log_.WaitLine("rank 1: waiting for its worker to attach from another host");
  // The local rank waits for it too.
  EXPECT_THAT(FrontendHarness::WorkerPids(), testing::IsEmpty());
  EXPECT_EQ(harness_->Health(), grpc::health::v1::HealthCheckResponse::NOT_SERVING);
  StartWorker(1);
  ASSERT_TRUE(harness_->WaitServing(true));
  log_.WaitLine("rank 1: worker ", absl::StrCat("attached from ipv4:", TwoHosts::kOther));
  TestCall first(harness_->channel(), FrontendHarness::Request("a"));
  TestCall second(harness_->channel(), FrontendHarness::Request("b"));
  ExpectServed(first);
  ExpectServed(second);
  EXPECT_THAT((std::vector<int>{first.last_job().result().ranks(0).rank(),
                                second.last_job().result().ranks(0).rank()}),
              testing::UnorderedElementsAre(0, 1));
  // Asked to, it ends in peace.
  harness_->Stop();
  const auto code = workers_[0]->Wait(kTestTimeout);
  ASSERT_TRUE(code.ok()) << code.status();
  EXPECT_EQ(*code, 0) << workers_[0]->output();
}

TEST_F(RemoteWorkersTest, TheRemoteWorkerHasTheLocalOnesFlagsAndItsOwnWin) {
  Start(IndependentReplicas(1), {0}, {"--load-error=as the server says"});
  ChildProcess& plain = StartWorker(0);
  const auto line = plain.WaitForLine("cannot load the model: as the server says", kTestTimeout);
  EXPECT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(plain.Wait(kTestTimeout).value_or(-1), 1);
  log_.WaitLine("could not load the model: as the server says");
  harness_->Stop();
  harness_->options().supervisor.worker_arguments = {"--load-hold=" + harness_->Path("never")};
  harness_->Start();
  StartWorker(0, {"--load-hold=/"});
  EXPECT_TRUE(harness_->WaitServing(true));
}

TEST_F(RemoteWorkersTest, ACutCableIsNoticedOnBothSidesAndAfterARestartItServesAgain) {
  Start(IndependentReplicas(1), {0});
  ChildProcess& worker = StartWorker(0);
  ASSERT_TRUE(harness_->WaitServing(true));
  TestCall running(harness_->channel(),
                   FrontendHarness::Request("hold_step=2:" + harness_->Path("never")));
  ASSERT_TRUE(running.ReadUntilStep(2));
  TestCall queued(harness_->channel(), FrontendHarness::Request("queued"));
  ASSERT_TRUE(queued.ReadUntilState(v1::JOB_STATE_QUEUED));
  const absl::Time cut = absl::Now();
  ASSERT_TRUE(hosts_->Cut().ok());

  const grpc::Status status = running.Finish();
  EXPECT_LT(absl::Now() - cut, 2 * kKeepalive + absl::Seconds(5));
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("lost its link, from another host"));
  const auto info = Detail<google::rpc::ErrorInfo>(status);
  EXPECT_EQ(info.reason(), "RANK_LOST");
  EXPECT_EQ(info.metadata().at("rank"), "0");
  ASSERT_TRUE(harness_->WaitServing(false));
  // The frontend cannot end it: it ends itself.
  const auto code = worker.Wait(kTestTimeout);
  ASSERT_TRUE(code.ok()) << code.status();
  EXPECT_EQ(*code, kExitCodeLinkLost);
  EXPECT_LT(absl::Now() - cut, 2 * kKeepalive + absl::Seconds(10));
  EXPECT_THAT(worker.output(), HasSubstr("lost the link to dlo-serve at "));

  // Started before the cable is there again, as a launcher does.
  StartWorker(0);
  ASSERT_TRUE(hosts_->Restore().ok());
  ExpectServed(queued);
  EXPECT_TRUE(harness_->WaitServing(true));
}

TEST_F(RemoteWorkersTest, AKilledRemoteRankEndsItsDomainAndTheOtherHostsLauncherBringsItBack) {
  Start(JoinedReplicas(3), {1, 2});
  StartWorker(1);
  StartWorker(2);
  ASSERT_TRUE(harness_->WaitServing(true));
  const std::string hold = "hold_step=1:" + harness_->Path("never");
  std::vector<std::unique_ptr<TestCall>> calls;
  for (int i = 0; i < 3; ++i) {
    calls.push_back(
        std::make_unique<TestCall>(harness_->channel(), FrontendHarness::Request(hold)));
  }
  for (auto& call : calls) ASSERT_TRUE(call->ReadUntilStep(1));
  workers_[0]->Signal(SIGKILL);
  for (auto& call : calls) {
    const auto info = Detail<google::rpc::ErrorInfo>(call->Finish());
    EXPECT_EQ(info.reason(), "RANK_LOST");
    EXPECT_EQ(info.metadata().at("rank"), "1");
  }
  // The other remote rank is told to go.
  EXPECT_EQ(workers_[1]->Wait(kTestTimeout).value_or(-1), kExitCodeLinkLost);
  EXPECT_THAT(workers_[1]->output(), HasSubstr("its dispatch domain is started again"));
  StartWorker(2);
  StartWorker(1);
  ASSERT_TRUE(harness_->WaitServing(true));
  std::vector<std::unique_ptr<TestCall>> more;
  for (int i = 0; i < 3; ++i) {
    more.push_back(std::make_unique<TestCall>(harness_->channel(), FrontendHarness::Request("x")));
  }
  for (auto& call : more) ExpectServed(*call);
}

TEST_F(RemoteWorkersTest, ASilentRemoteRankIsLostAsALocalOneIs) {
  Start(IndependentReplicas(1), {0});
  harness_->Stop();
  harness_->options().supervisor.heartbeat_timeout = absl::Milliseconds(1500);
  // Pings of a stopped process are not answered either: let them be later.
  harness_->options().remote->keepalive = {absl::Seconds(60), absl::Seconds(60)};
  harness_->Start();
  ChildProcess& worker = StartWorker(0);
  ASSERT_TRUE(harness_->WaitServing(true));
  worker.Signal(SIGSTOP);
  ASSERT_TRUE(harness_->WaitServing(false));
  log_.WaitLine("rank 0: the worker was not heard of for 1.5s");
  // It goes when it wakes up.
  worker.Signal(SIGCONT);
  EXPECT_EQ(worker.Wait(kTestTimeout).value_or(-1), kExitCodeLinkLost);
}

TEST_F(RemoteWorkersTest, WhoHasNoPlaceIsRefusedWithTheReasonOnBothSides) {
  Start(IndependentReplicas(2), {1});
  StartWorker(1);
  log_.WaitLine("rank 1: worker ", "attached");
  ASSERT_TRUE(harness_->WaitServing(true));
  v1::Hello other_version = HelloOf(1);
  other_version.set_protocol_version(kLinkProtocolVersion + 1);
  v1::Hello other_build = HelloOf(1);
  other_build.set_build_id("0.0.0+other");
  const struct {
    v1::Hello hello;
    std::string reason;
  } kCases[] = {
      {HelloOf(1), absl::StrCat("rank 1 is already attached, from ipv4:", TwoHosts::kOther)},
      {HelloOf(0), "rank 0 is started by dlo-serve itself; from other hosts rank 1 may attach"},
      {HelloOf(2), "rank 2 is not in 0..1"},
      {HelloOf(-1), "rank -1 is not in 0..1"},
      {other_version, absl::StrCat("speaks link protocol ", kLinkProtocolVersion + 1)},
      {other_build, "dlo-worker is build 0.0.0+other"},
      {v1::Hello(), "speaks link protocol 0"},
  };
  for (const auto& c : kCases) {
    const grpc::Status status = AttachAndFinish(c.hello, Credentials(worker_tls_));
    EXPECT_EQ(status.error_code(), StatusCode::FAILED_PRECONDITION) << c.reason;
    EXPECT_THAT(status.error_message(), HasSubstr(c.reason));
    log_.WaitLine(absl::StrCat("refused a worker from ipv4:", TwoHosts::kHere), c.reason);
  }
  // As a worker's own log has it.
  ChildProcess& second = StartWorker(1);
  EXPECT_EQ(second.Wait(kTestTimeout).value_or(-1), kExitCodeLinkLost);
  EXPECT_THAT(second.output(), AllOf(HasSubstr("refused by dlo-serve at "),
                                     HasSubstr("rank 1 is already attached")));
  // Nobody was harmed.
  EXPECT_EQ(harness_->Health(), grpc::health::v1::HealthCheckResponse::SERVING);
  ExpectServed("a");
}

TEST_F(RemoteWorkersTest, WhoCannotProveWhoTheyAreDoNotEvenReachTheProtocol) {
  Start(IndependentReplicas(1), {0});
  const auto foreign_ca = TestCa::Create(folder_ / "foreign");
  ASSERT_TRUE(foreign_ca.ok()) << foreign_ca.status();
  const auto foreign = foreign_ca->Issue("worker", "DNS:worker");
  ASSERT_TRUE(foreign.ok()) << foreign.status();
  const auto ours = LoadLinkTls(worker_tls_);
  const auto theirs = LoadLinkTls(*foreign);
  ASSERT_TRUE(ours.ok() && theirs.ok());

  EXPECT_EQ(AttachAndFinish(HelloOf(0), grpc::InsecureChannelCredentials()).error_code(),
            StatusCode::UNAVAILABLE);
  // Knows the server's CA, has no certificate.
  EXPECT_EQ(AttachAndFinish(HelloOf(0), grpc::SslCredentials({ours->ca_pem, "", ""})).error_code(),
            StatusCode::UNAVAILABLE);
  log_.WaitLine("worker link, TLS", "peer did not return a certificate");
  // Has one of another CA.
  EXPECT_EQ(AttachAndFinish(HelloOf(0),
                            grpc::SslCredentials({ours->ca_pem, theirs->key_pem, theirs->cert_pem}))
                .error_code(),
            StatusCode::UNAVAILABLE);
  log_.WaitLine("worker link, TLS", "certificate verify failed");
  EXPECT_THAT(log_.text(), Not(HasSubstr("attached from")));

  // A worker that trusts another CA refuses the server.
  const LinkTlsFiles good = worker_tls_;
  worker_tls_ = *foreign;
  ChildProcess& worker = StartWorker(0, {"--connect-timeout-ms=1000"});
  EXPECT_EQ(worker.Wait(kTestTimeout).value_or(-1), kExitCodeLinkLost);
  EXPECT_THAT(worker.output(), AllOf(HasSubstr("cannot attach to dlo-serve at "),
                                     HasSubstr("certificate verify failed")));
  // Files that do not belong together are found out before anything is sent.
  worker_tls_ = {good.ca, foreign->cert, foreign->key};
  ChildProcess& mixed = StartWorker(0);
  EXPECT_EQ(mixed.Wait(kTestTimeout).value_or(-1), 1);
  EXPECT_THAT(mixed.output(), HasSubstr("does not stand before the CA"));
  worker_tls_ = good;
  StartWorker(0);
  EXPECT_TRUE(harness_->WaitServing(true));
}

TEST_F(RemoteWorkersTest, AWorkerThatComesFirstWaitsForTheServer) {
  Start(IndependentReplicas(1), {0});
  // The same port again.
  const std::string address = harness_->frontend().worker_address();
  harness_->options().remote->listen = address;
  harness_->Stop();
  std::vector<std::string> argv = {std::string(DLO_BINARY_DIR) + "/tests/scripted-worker",
                                   "--connect=" + address,
                                   "--rank=0",
                                   "--tls-ca=" + worker_tls_.ca,
                                   "--tls-cert=" + worker_tls_.cert,
                                   "--tls-key=" + worker_tls_.key};
  auto worker = ChildProcess::Start(hosts_->OnOther(argv));
  ASSERT_TRUE(worker.ok()) << worker.status();
  ASSERT_TRUE((*worker)->WaitForLine("connecting to dlo-serve at", kTestTimeout).ok());
  workers_.push_back(*std::move(worker));
  harness_->Start();
  EXPECT_TRUE(harness_->WaitServing(true));
  // Its launcher may end it.
  workers_[0]->Signal(SIGTERM);
  EXPECT_EQ(workers_[0]->Wait(kTestTimeout).value_or(-1), 4);
}

TEST_F(RemoteWorkersTest, FilesThatCannotBeUsedAreNamed) {
  const auto ca = TestCa::Create(folder_ / "other");
  ASSERT_TRUE(ca.ok()) << ca.status();
  const auto expired = ca->Issue("expired", "DNS:x", /*days=*/-1);
  ASSERT_TRUE(expired.ok()) << expired.status();
  const auto good = ca->Issue("good", "DNS:x");
  ASSERT_TRUE(good.ok()) << good.status();
  EXPECT_TRUE(LoadLinkTls(*good).ok());
  const std::string none = (folder_ / "none.pem").string();
  const struct {
    LinkTlsFiles files;
    std::string reason;
  } kCases[] = {
      {{none, good->cert, good->key}, "none.pem"},
      {{good->key, good->cert, good->key}, "holds no certificate"},
      {{good->ca, good->cert, good->cert}, "holds no private key"},
      {{good->ca, good->cert, expired->key}, "is not the key of the certificate"},
      {*expired, "certificate has expired"},
      {{server_tls_.ca, good->cert, good->key}, "does not stand before the CA"},
  };
  for (const auto& c : kCases) {
    EXPECT_THAT(std::string(LoadLinkTls(c.files).status().message()), HasSubstr(c.reason));
  }
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
