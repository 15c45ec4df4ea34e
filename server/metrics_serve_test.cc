// /metrics of the dlo-serve binary, with scripted workers and the demo model's card: what it says
// after requests and losses, what promtool finds in it, and what a real Prometheus makes of it.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <google/rpc/error_details.pb.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "nlohmann/json.hpp"
#include "server/testing/frontend_harness.h"
#include "tests/e2e/child_process.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

// The body of the answer; empty if there is none.
std::string HttpGet(const std::string& address, const std::string& path) {
  const std::vector<std::string> parts = absl::StrSplit(address, ':');
  int port = 0;
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[1], &port)) return "";
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  if (inet_pton(AF_INET, parts[0].c_str(), &to.sin_addr) != 1) return "";
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::string answer;
  if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0) {
    const std::string request =
        absl::StrCat("GET ", path, " HTTP/1.0\r\nHost: ", address, "\r\n\r\n");
    if (write(fd, request.data(), request.size()) == static_cast<ssize_t>(request.size())) {
      char buffer[65536];
      for (ssize_t n; (n = read(fd, buffer, sizeof(buffer))) > 0;) answer.append(buffer, n);
    }
  }
  close(fd);
  const size_t body = answer.find("\r\n\r\n");
  return body == std::string::npos ? "" : answer.substr(body + 4);
}

std::string After(const std::string& line, const std::string& text) {
  const size_t at = line.find(text);
  return at == std::string::npos ? "" : line.substr(at + text.size());
}

class MetricsServeTest : public testing::Test {
 protected:
  MetricsServeTest() {
    std::string pattern = (fs::temp_directory_path() / "metrics-test-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    fs::create_directories(folder_ / "bin");
    fs::copy_file(fs::path(DLO_BINARY_DIR) / "bin/dlo-serve", folder_ / "bin/dlo-serve");
    const fs::path script = folder_ / "bin/dlo-worker";
    std::ofstream(script) << "#!/bin/sh\nexec '" << DLO_BINARY_DIR
                          << "/tests/scripted-worker' \"$@\"\n";
    fs::permissions(script, fs::perms::owner_all);
  }
  ~MetricsServeTest() override {
    channel_.reset();
    serve_.reset();
    fs::remove_all(folder_);
  }

  void Spawn(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(),
                     {(folder_ / "bin/dlo-serve").string(),
                      "--data-dir=" + (folder_ / "data").string(), "--listen=127.0.0.1:0"});
    auto serve = ChildProcess::Start(arguments);
    ASSERT_TRUE(serve.ok()) << serve.status();
    serve_ = *std::move(serve);
  }

  // Waits until it serves both.
  void Start(std::vector<std::string> arguments = {}) {
    arguments.push_back("--metrics-listen=127.0.0.1:0");
    Spawn(std::move(arguments));
    const auto metrics = serve_->WaitForLine("metrics on http://", kTestTimeout);
    ASSERT_TRUE(metrics.ok()) << metrics.status();
    metrics_ = absl::StrReplaceAll(After(*metrics, "http://"), {{"/metrics", ""}});
    EXPECT_THAT(metrics_, testing::MatchesRegex("127\\.0\\.0\\.1:[1-9][0-9]*"));
    const auto serving = serve_->WaitForLine("serving on ", kTestTimeout);
    ASSERT_TRUE(serving.ok()) << serving.status();
    channel_ =
        grpc::CreateChannel(After(*serving, "serving on "), grpc::InsecureChannelCredentials());
  }

  std::map<std::string, double> Scrape() const {
    std::map<std::string, double> series;
    for (const std::string& line :
         std::vector<std::string>(absl::StrSplit(HttpGet(metrics_, "/metrics"), '\n'))) {
      const size_t space = line.rfind(' ');
      if (line.empty() || line[0] == '#' || space == std::string::npos) continue;
      series[line.substr(0, space)] = std::stod(line.substr(space + 1));
    }
    return series;
  }

  double Value(const std::string& series) const {
    const std::map<std::string, double> all = Scrape();
    const auto it = all.find(series);
    if (it == all.end()) return std::nan("");
    return it->second;
  }

  bool WaitFor(const std::function<bool()>& condition) const {
    for (const absl::Time end = absl::Now() + kTestTimeout; absl::Now() < end;) {
      if (condition()) return true;
      absl::SleepFor(absl::Milliseconds(5));
    }
    return false;
  }
  bool WaitValue(const std::string& series, double value) const {
    const bool reached = WaitFor([&] { return Value(series) == value; });
    EXPECT_TRUE(reached) << series << " is " << Value(series) << ", not " << value;
    return reached;
  }

  std::vector<int> Workers() const {
    std::vector<int> pids;
    for (const auto& task :
         fs::directory_iterator(absl::StrCat("/proc/", serve_->pid(), "/task"))) {
      std::ifstream children(task.path() / "children");
      for (int pid; children >> pid;) pids.push_back(pid);
    }
    return pids;
  }

  static v1::GenerateRequest Request(const std::string& prompt) {
    v1::GenerateRequest request = FrontendHarness::Request(prompt);
    request.mutable_settings()->set_num_inference_steps(4);
    return request;
  }

  // Runs a program that needs no input; its exit code and what it wrote.
  static std::pair<int, std::string> Run(const std::vector<std::string>& argv) {
    auto process = ChildProcess::Start(argv);
    if (!process.ok()) return {-1, process.status().ToString()};
    const absl::StatusOr<int> code = (*process)->Wait(kTestTimeout);
    return {code.value_or(-1), (*process)->output()};
  }

  fs::path folder_;
  std::unique_ptr<ChildProcess> serve_;
  std::string metrics_;  // its address
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(MetricsServeTest, TellsWhatBecameOfRequests) {
  Start({"--max-waiting=0"});
  for (const char* outcome : {"succeeded", "failed", "cancelled", "refused"}) {
    EXPECT_EQ(Value(absl::StrCat("dlo_requests_total{outcome=\"", outcome, "\"}")), 0);
  }
  EXPECT_EQ(Value("dlo_serving"), 1);

  ASSERT_TRUE(TestCall(channel_, Request("a red circle")).Finish().ok());
  std::map<std::string, double> series = Scrape();
  EXPECT_EQ(series["dlo_requests_total{outcome=\"succeeded\"}"], 1);
  EXPECT_EQ(series["dlo_request_duration_seconds_count"], 1);
  EXPECT_EQ(series["dlo_request_queue_duration_seconds_count"], 1);
  EXPECT_EQ(series["dlo_denoise_step_duration_seconds_count"], 4);
  EXPECT_EQ(series["dlo_wave_requests_sum"], 1);
  EXPECT_EQ(series["dlo_wave_fill_ratio_sum"], 1);
  for (const char* stage : {"text", "denoise", "decode", "encode_tail"}) {
    const std::string name = "dlo_request_stage_duration_seconds_count";
    EXPECT_EQ(series[absl::StrCat(name, "{stage=\"", stage, "\"}")], 1) << stage;
  }
  EXPECT_EQ(series["dlo_rank_bus_bytes_total{rank=\"0\"}"], 1000);

  const std::string hold = "hold_step=1:" + (folder_ / "never").string();
  {
    TestCall running(channel_, Request(hold));
    ASSERT_TRUE(running.ReadUntilStep(1));
    WaitValue("dlo_requests_running", 1);
    EXPECT_EQ(TestCall(channel_, Request("x")).Finish().error_code(),
              grpc::StatusCode::RESOURCE_EXHAUSTED);
    WaitValue("dlo_request_refusals_total{reason=\"QUEUE_FULL\"}", 1);
    running.Cancel();
    running.Finish();
  }
  WaitValue("dlo_requests_total{outcome=\"cancelled\"}", 1);
  WaitValue("dlo_requests_running", 0);

  v1::GenerateRequest wrong = Request("x");
  wrong.mutable_settings()->set_width(100);
  EXPECT_EQ(TestCall(channel_, wrong).Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Value("dlo_request_refusals_total{reason=\"INVALID_ARGUMENT\"}"), 1);
  EXPECT_EQ(Value("dlo_requests_total{outcome=\"refused\"}"), 2);

  // The worker may still be ending the wave of what was cancelled; nothing waits here.
  grpc::Status status;
  EXPECT_TRUE(WaitFor([&] {
    status = TestCall(channel_, Request("oom")).Finish();
    return !absl::StrContains(status.error_message(), "the queue is full");
  }));
  EXPECT_EQ(Detail<google::rpc::ErrorInfo>(status).reason(), "OUT_OF_MEMORY");
  EXPECT_EQ(Value("dlo_request_failures_total{reason=\"OUT_OF_MEMORY\"}"), 1);
  EXPECT_EQ(Value("dlo_requests_total{outcome=\"failed\"}"), 1);
}

TEST_F(MetricsServeTest, TellsOfALostWorkerAndOfItsReturn) {
  Start({"--dp=2"});
  for (const char* rank : {"0", "1"}) {
    WaitValue(absl::StrCat("dlo_rank_state{rank=\"", rank, "\",state=\"ready\"}"), 1);
    EXPECT_EQ(Value(absl::StrCat("dlo_rank_starts_total{rank=\"", rank, "\"}")), 1);
  }
  EXPECT_EQ(Value("dlo_worker_restarts_total{reason=\"killed\"}"), 0);
  // Without company a request goes to rank 0.
  const std::string hold = "hold_step=1:" + (folder_ / "never").string();
  TestCall running(channel_, Request(hold));
  ASSERT_TRUE(running.ReadUntilStep(1));
  for (const int worker : Workers()) {
    std::ifstream arguments(absl::StrCat("/proc/", worker, "/cmdline"));
    for (std::string argument; std::getline(arguments, argument, '\0');) {
      if (argument == "--rank=0") kill(worker, SIGKILL);
    }
  }
  EXPECT_EQ(running.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Value("dlo_request_failures_total{reason=\"RANK_LOST\"}"), 1);
  WaitValue("dlo_worker_restarts_total{reason=\"killed\"}", 1);
  WaitValue("dlo_rank_starts_total{rank=\"0\"}", 2);
  WaitValue("dlo_rank_state{rank=\"0\",state=\"ready\"}", 1);
  EXPECT_EQ(Value("dlo_rank_starts_total{rank=\"1\"}"), 1);
  EXPECT_EQ(Value("dlo_worker_restarts_total{reason=\"exited\"}"), 0);
}

TEST_F(MetricsServeTest, TellsEachRanksMemoryAndTheCgroups) {
  Start({"--dp=2"});
  for (const char* rank : {"0", "1"}) {
    const std::string label = absl::StrCat("rank=\"", rank, "\"}");
    const auto device = [&](const char* kind) {
      return absl::StrCat("dlo_rank_device_memory_bytes{kind=\"", kind, "\",", label);
    };
    WaitValue(device("used"), 900);
    EXPECT_EQ(Value(device("peak")), 1 << 20);
    EXPECT_EQ(Value(device("weights")), 600);
    EXPECT_EQ(Value(device("activations")), 300);
    EXPECT_EQ(Value("dlo_rank_pinned_bytes{" + label), 50);
    for (const char* kind : {"pss", "private_dirty", "shared_clean"}) {
      EXPECT_GT(Value(absl::StrCat("dlo_rank_host_memory_bytes{kind=\"", kind, "\",", label)), 4096)
          << kind;
    }
  }
  // No more than the worker holds: its resident set bounds its share.
  EXPECT_LT(Value("dlo_rank_host_memory_bytes{kind=\"pss\",rank=\"0\"}"), 1 << 30);
  const std::map<std::string, double> series = Scrape();
  ASSERT_EQ(series.count("dlo_cgroup_memory_bytes"), 1u);
  ASSERT_EQ(series.count("dlo_cgroup_memory_limit_bytes"), 1u);
}

TEST_F(MetricsServeTest, PromtoolFindsNothingToSay) {
  Start();
  ASSERT_TRUE(TestCall(channel_, Request("a red circle")).Finish().ok());
  const fs::path file = folder_ / "metrics.txt";
  std::ofstream(file) << HttpGet(metrics_, "/metrics");
  ASSERT_GT(fs::file_size(file), 1000u);
  const auto [code, output] =
      Run({"/bin/sh", "-c", "exec promtool check metrics <'" + file.string() + "'"});
  EXPECT_EQ(code, 0) << output;
  EXPECT_EQ(output, "");
  // It does find what is there to find.
  std::ofstream(file) << "# TYPE dlo_things counter\ndlo_things 1\n";
  EXPECT_NE(Run({"/bin/sh", "-c", "exec promtool check metrics <'" + file.string() + "'"}).first,
            0);
}

TEST_F(MetricsServeTest, PrometheusScrapesItByTheConfigurationInDeploy) {
  Start();
  ASSERT_TRUE(TestCall(channel_, Request("a red circle")).Finish().ok());
  const fs::path deploy = fs::path(DLO_SOURCE_DIR) / "deploy";
  std::stringstream config;
  config << std::ifstream(deploy / "prometheus.yml").rdbuf();
  const std::string changed = absl::StrReplaceAll(
      config.str(),
      {{"127.0.0.1:9464", metrics_}, {"scrape_interval: 15s", "scrape_interval: 1s"}});
  ASSERT_THAT(changed, HasSubstr("- " + metrics_));
  ASSERT_THAT(changed, HasSubstr("scrape_interval: 1s"));
  std::ofstream(folder_ / "prometheus.yml") << changed;
  fs::copy_file(deploy / "alerts.yml", folder_ / "alerts.yml");
  const auto [code, output] =
      Run({"/usr/bin/promtool", "check", "config", (folder_ / "prometheus.yml").string()});
  ASSERT_EQ(code, 0) << output;

  auto prometheus = ChildProcess::Start(
      {"/usr/bin/prometheus", "--config.file=" + (folder_ / "prometheus.yml").string(),
       "--storage.tsdb.path=" + (folder_ / "tsdb").string(), "--web.listen-address=127.0.0.1:0"},
      {"GOMAXPROCS=1"});
  ASSERT_TRUE(prometheus.ok()) << prometheus.status();
  const auto listening = (*prometheus)->WaitForLine("msg=\"Listening on\"", kTestTimeout);
  ASSERT_TRUE(listening.ok()) << listening.status();
  const std::string api = After(*listening, "address=");
  // The value of a query with one result.
  const auto query = [&](const std::string& expression) -> std::string {
    const auto answer = nlohmann::json::parse(HttpGet(api, "/api/v1/query?query=" + expression),
                                              nullptr, /*allow_exceptions=*/false);
    if (!answer.is_object() || answer.value("status", "") != "success") return "no answer";
    const auto& result = answer["data"]["result"];
    return result.size() == 1 ? result[0]["value"][1].get<std::string>() : "no result";
  };
  EXPECT_TRUE(WaitFor([&] { return query("up") == "1"; }))
      << query("up") << "\n"
      << HttpGet(api, "/api/v1/targets") << (*prometheus)->output();
  EXPECT_EQ(query("dlo_requests_total%7Boutcome=%22succeeded%22%7D"), "1");
  EXPECT_EQ(query("dlo_rank_state%7Bstate=%22ready%22%7D"), "1");
  EXPECT_EQ(query("histogram_quantile(0.5,dlo_wave_requests_bucket)"), "0.5");
  EXPECT_EQ(query("count(ALERTS)"), "no result") << "an alert for a server that is well";
  // What it scrapes changes.
  ASSERT_TRUE(TestCall(channel_, Request("a red circle")).Finish().ok());
  EXPECT_TRUE(WaitFor([&] { return query("dlo_request_duration_seconds_count") == "2"; }));
  (*prometheus)->Signal(SIGTERM);
  const absl::StatusOr<int> ended = (*prometheus)->Wait(kTestTimeout);
  ASSERT_TRUE(ended.ok()) << ended.status();
  EXPECT_EQ(*ended, 0);
}

TEST_F(MetricsServeTest, APortInUseEndsTheStartWithTheKeyTheValueAndTheWayOut) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(fd, 1), 0);
  ASSERT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string taken = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  Spawn({"--metrics-listen=" + taken});
  const absl::StatusOr<int> code = serve_->Wait(kTestTimeout);
  ASSERT_TRUE(code.ok()) << code.status();
  EXPECT_EQ(*code, 1);
  EXPECT_THAT(serve_->output(), HasSubstr("metrics_listen is \"" + taken + "\""));
  EXPECT_THAT(serve_->output(), HasSubstr("Address already in use"));
  EXPECT_THAT(serve_->output(), HasSubstr("choose another address"));
  close(fd);
}

TEST_F(MetricsServeTest, WithoutTheKeyNothingIsServed) {
  Spawn({});
  ASSERT_TRUE(serve_->WaitForLine("serving on ", kTestTimeout).ok());
  EXPECT_THAT(serve_->output(), Not(HasSubstr("metrics on")));
}

}  // namespace
}  // namespace dlo
