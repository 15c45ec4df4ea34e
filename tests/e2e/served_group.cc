#include "tests/e2e/served_group.h"

#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <signal.h>
#include <stdlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <functional>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;
using grpc::health::v1::Health;
using grpc::health::v1::HealthCheckResponse;

constexpr absl::Duration kStartTimeout = absl::Seconds(60);
constexpr absl::Duration kStopTimeout = absl::Seconds(60);
constexpr absl::Duration kGoneTimeout = absl::Seconds(5);

// Of data_dir, once the server has ended.
bool IsKept(const std::string& name) {
  constexpr std::array<const char*, 5> kNames = {"jobs.db", "lock", "lost+found", "reports",
                                                 "results"};
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

bool WaitFor(const std::function<bool()>& condition, absl::Duration timeout) {
  for (const absl::Time end = absl::Now() + timeout; absl::Now() < end;) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return condition();
}

std::string ReadAll(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::set<std::string> NamesIn(const fs::path& folder) {
  std::set<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    names.insert(entry.path().filename());
  }
  return names;
}

// Whether a process of that number still runs; one that has ended and was not reaped does not.
bool IsRunning(pid_t pid) {
  const std::string stat = ReadAll(absl::StrCat("/proc/", pid, "/stat"));
  const size_t name_end = stat.rfind(") ");
  return name_end != std::string::npos && stat[name_end + 2] != 'Z' && stat[name_end + 2] != 'X';
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServedGroup>> ServedGroup::Create(Options options) {
  std::string pattern = (fs::temp_directory_path() / "dlo-group-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) return absl::ErrnoToStatus(errno, pattern);
  std::unique_ptr<ServedGroup> group(new ServedGroup(std::move(options), pattern));
  RETURN_IF_ERROR(group->Prepare());
  return group;
}

absl::Status ServedGroup::Prepare() {
  const fs::path bin = fs::path(DLO_BINARY_DIR) / "bin";
  if (options_.worker.empty()) options_.worker = bin / "dlo-worker";
  if (options_.data_dir.empty()) options_.data_dir = folder_ / "data";
  std::error_code error;
  for (const char* name : {"bin", "tmp", "faults"}) fs::create_directory(folder_ / name, error);
  fs::copy_file(bin / "dlo-serve", folder_ / "bin/dlo-serve", error);
  if (error) return absl::InternalError(error.message());
  const fs::path script = folder_ / "bin/dlo-worker";
  std::ofstream(script) << "#!/bin/sh\nexec '" << options_.worker.string()
                        << "' '--failpoints=" << (folder_ / "faults").string() << "' \"$@\"\n";
  fs::permissions(script, fs::perms::owner_all, error);
  shared_memory_before_ = NamesIn("/dev/shm");
  return absl::OkStatus();
}

ServedGroup::~ServedGroup() {
  for (const pid_t pid : Processes()) kill(pid, SIGKILL);
  serve_.reset();
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

absl::Status ServedGroup::Start() {
  // The output goes to a file, which never fills as a pipe does.
  std::vector<std::string> command = {"/bin/sh", "-c", "log=$1; shift; exec \"$@\" >>\"$log\" 2>&1",
                                      "sh", (folder_ / "log").string()};
  for (const std::string& argument :
       {(folder_ / "bin/dlo-serve").string(),
        absl::StrCat("--config=", DLO_SOURCE_DIR, "/configs/shapes.yaml"),
        absl::StrCat("--listen=", address()),
        absl::StrCat("--data-dir=", options_.data_dir.string()), absl::StrCat("--dp=", options_.dp),
        absl::StrCat("--transfer=", options_.transfer), std::string("--threads=1")}) {
    command.push_back(argument);
  }
  command.insert(command.end(), options_.arguments.begin(), options_.arguments.end());
  absl::StatusOr<std::unique_ptr<ChildProcess>> serve = ChildProcess::Start(
      command, {"OMP_NUM_THREADS=1", absl::StrCat("TMPDIR=", (folder_ / "tmp").string())});
  RETURN_IF_ERROR(serve.status());
  serve_ = *std::move(serve);
  const auto stub = Health::NewStub(channel());
  const bool answers = WaitFor(
      [&] {
        grpc::ClientContext context;
        // Only a call that waits makes the channel connect again.
        context.set_wait_for_ready(true);
        context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Milliseconds(200)));
        HealthCheckResponse response;
        return stub->Check(&context, {}, &response).ok() || !IsRunning(serve_pid());
      },
      kStartTimeout);
  if (answers && IsRunning(serve_pid())) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("dlo-serve does not answer; it wrote:\n", Log()));
}

absl::StatusOr<absl::Duration> ServedGroup::Stop() {
  const absl::Time start = absl::Now();
  serve_->Signal(SIGTERM);
  const absl::StatusOr<int> code = serve_->Wait(kStopTimeout);
  if (!code.ok()) return code.status();
  if (*code == 0) return absl::Now() - start;
  return absl::InternalError(absl::StrCat("dlo-serve exited with ", *code, "; it wrote:\n", Log()));
}

void ServedGroup::Kill() {
  serve_->Signal(SIGKILL);
  serve_->Wait(kStopTimeout).IgnoreError();
}

std::vector<pid_t> ServedGroup::Processes() const {
  std::vector<pid_t> pids;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/proc", error)) {
    pid_t pid = 0;
    if (!absl::SimpleAtoi(entry.path().filename().string(), &pid) || !IsRunning(pid)) continue;
    if (absl::StrContains(ReadAll(entry.path() / "cmdline"), folder_.string())) pids.push_back(pid);
  }
  return pids;
}

std::map<int, pid_t> ServedGroup::Workers() const {
  std::map<int, pid_t> workers;
  for (const pid_t pid : Processes()) {
    if (pid == serve_pid()) continue;
    std::ifstream arguments(absl::StrCat("/proc/", pid, "/cmdline"));
    for (std::string argument; std::getline(arguments, argument, '\0');) {
      absl::string_view value = argument;
      int rank = 0;
      if (absl::ConsumePrefix(&value, "--rank=") && absl::SimpleAtoi(value, &rank)) {
        workers[rank] = pid;
      }
    }
  }
  return workers;
}

std::shared_ptr<grpc::Channel> ServedGroup::channel() const {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 20);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 100);
  return grpc::CreateCustomChannel(address(), grpc::InsecureChannelCredentials(), arguments);
}

bool ServedGroup::WaitServing(bool serving, absl::Duration timeout) const {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  const auto stub = Health::NewStub(channel());
  const auto reader = stub->Watch(&context, {});
  HealthCheckResponse response;
  const auto wanted = serving ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
  bool reached = false;
  while (!reached && reader->Read(&response)) reached = response.status() == wanted;
  context.TryCancel();
  reader->Finish();
  return reached;
}

void ServedGroup::Arm(const std::string& place, const std::string& action, int rank) const {
  const fs::path path =
      folder_ / "faults" / absl::StrCat(place, ".", rank < 0 ? "all" : absl::StrCat(rank));
  const fs::path partial = path.string() + ".new";
  std::ofstream(partial) << action;
  fs::rename(partial, path);
}

void ServedGroup::Disarm(const std::string& place, int rank) const {
  std::error_code ignored;
  fs::remove(folder_ / "faults" / absl::StrCat(place, ".", rank < 0 ? "all" : absl::StrCat(rank)),
             ignored);
}

pid_t ServedGroup::WaitReached(const std::string& place, int rank, pid_t other_than,
                               absl::Duration timeout) const {
  pid_t pid = -1;
  const bool reached = WaitFor(
      [&] {
        const std::string text =
            ReadAll(folder_ / "faults" / absl::StrCat("reached.", place, ".", rank));
        return absl::SimpleAtoi(text, &pid) && pid != other_than;
      },
      timeout);
  return reached ? pid : -1;
}

void ServedGroup::Forget(const std::string& place) const {
  std::error_code ignored;
  for (int rank = 0; rank < options_.dp; ++rank) {
    fs::remove(folder_ / "faults" / absl::StrCat("reached.", place, ".", rank), ignored);
  }
}

int ServedGroup::CountPartialResults() const {
  int count = 0;
  for (const std::string& name : NamesIn(options_.data_dir / "results")) {
    if (absl::EndsWith(name, ".partial")) ++count;
  }
  return count;
}

std::vector<std::string> ServedGroup::LeftoversNow() const {
  std::vector<std::string> left;
  for (const pid_t pid : Processes()) left.push_back(absl::StrCat("process ", pid));
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);) {
    if (absl::StrContains(line, folder_.string())) left.push_back(absl::StrCat("socket ", line));
  }
  if (fs::exists(folder_ / "api.sock")) left.push_back("the socket's file");
  for (const std::string& name : NamesIn("/dev/shm")) {
    if (shared_memory_before_.count(name) == 0) left.push_back(absl::StrCat("/dev/shm/", name));
  }
  for (const std::string& name : NamesIn(folder_ / "tmp")) {
    left.push_back(absl::StrCat("temporary file ", name));
  }
  for (const std::string& name : NamesIn(options_.data_dir)) {
    if (!IsKept(name)) {
      left.push_back(absl::StrCat("in data_dir: ", name));
    }
  }
  if (CountPartialResults() > 0) left.push_back("a part of a result");
  return left;
}

std::string ServedGroup::Leftovers() const {
  WaitFor([this] { return LeftoversNow().empty(); }, kGoneTimeout);
  return absl::StrJoin(LeftoversNow(), "\n");
}

std::string ServedGroup::Log() const { return ReadAll(folder_ / "log"); }

ProcessMemory MemoryOf(pid_t pid) {
  ProcessMemory memory;
  std::ifstream rollup(absl::StrCat("/proc/", pid, "/smaps_rollup"));
  for (std::string line; std::getline(rollup, line);) {
    for (const auto& [name, bytes] : {std::pair{"Rss:", &memory.rss_bytes},
                                      {"Pss:", &memory.pss_bytes},
                                      {"Private_Dirty:", &memory.private_dirty_bytes}}) {
      absl::string_view value = line;
      int64_t kib = 0;
      if (absl::ConsumePrefix(&value, name) && absl::ConsumeSuffix(&value, "kB") &&
          absl::SimpleAtoi(value, &kib)) {
        *bytes = kib << 10;
      }
    }
  }
  return memory;
}

int CountOpenFiles(pid_t pid) {
  return static_cast<int>(NamesIn(absl::StrCat("/proc/", pid, "/fd")).size());
}

}  // namespace dlo
