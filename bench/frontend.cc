// How many jobs dlo-serve takes and completes with workers that answer at once, how long SubmitJob
// takes with a full queue, and what memory that needs. The clients, dlo-serve and its workers (the
// real worker code around a pipeline that computes nothing) share the machine's cores.
//
//   bench_frontend [--seconds=8] [--dp=2] [--outstanding=80] [--connections=4]
//
// First `outstanding` jobs are kept submitted and not completed. A job counts as completed once its
// watcher was told, which is after its record and its video are on the disk. The first two seconds
// do not count. Then the workers are held, 64 jobs wait, and four clients submit and cancel.
#include <grpcpp/client_context.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "dlo/v1/video_generation.grpc.pb.h"
#include "tests/e2e/served_group.h"

namespace dlo {
namespace {

constexpr absl::Duration kWarmUp = absl::Seconds(2);
constexpr int kWaiting = 64;
constexpr int kProbes = 4;
constexpr int kSubmitsPerProbe = 250;

struct Flags {
  int seconds = 8;
  int dp = 2;
  int outstanding = 80;
  int connections = 4;
};

// What the clients count. Thread-safe.
class Counts {
 public:
  void Submitted(absl::Duration took) {
    absl::MutexLock lock(&mutex_);
    if (counting_) submit_times_.push_back(took);
  }
  void Completed() {
    absl::MutexLock lock(&mutex_);
    if (counting_) ++completed_;
  }
  void Failed(const std::string& why) {
    absl::MutexLock lock(&mutex_);
    if (failures_++ == 0) first_failure_ = why;
  }
  void SetCounting(bool counting) {
    absl::MutexLock lock(&mutex_);
    counting_ = counting;
  }

  struct Figures {
    int64_t completed = 0;
    int64_t failures = 0;
    std::string first_failure;
    std::vector<absl::Duration> submit_times;  // ascending
  };
  Figures figures() {
    absl::MutexLock lock(&mutex_);
    std::sort(submit_times_.begin(), submit_times_.end());
    return {completed_, failures_, first_failure_, submit_times_};
  }

 private:
  absl::Mutex mutex_;
  bool counting_ = false;
  int64_t completed_ = 0;
  int64_t failures_ = 0;
  std::string first_failure_;
  std::vector<absl::Duration> submit_times_;
};

v1::GenerateRequest SmallRequest(const std::string& prompt) {
  v1::GenerateRequest request;
  request.set_prompt(prompt);
  request.set_output_format(v1::OUTPUT_FORMAT_SAFETENSORS);
  request.mutable_settings()->set_width(16);
  request.mutable_settings()->set_height(16);
  request.mutable_settings()->set_num_frames(1);
  request.mutable_settings()->set_num_inference_steps(1);
  return request;
}

// Submits a job, watches it to its end, and begins again until it is stopped.
class Client : public grpc::ClientReadReactor<v1::GenerateEvent> {
 public:
  Client(v1::VideoGeneration::Stub* stub, Counts* counts)
      : stub_(stub), counts_(counts), request_(SmallRequest("a red circle")) {}

  void Begin() {
    submit_context_ = std::make_unique<grpc::ClientContext>();
    start_ = absl::Now();
    stub_->async()->SubmitJob(submit_context_.get(), &request_, &job_,
                              [this](const grpc::Status& status) { OnSubmitted(status); });
  }
  void Stop() { stopping_ = true; }
  void Join() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&stopped_));
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (event_.has_job()) last_ = event_.job().state();
    StartRead(&event_);
  }

  void OnDone(const grpc::Status& status) override {
    if (status.ok() && last_ == v1::JOB_STATE_SUCCEEDED) {
      counts_->Completed();
    } else {
      counts_->Failed(
          absl::StrCat("WatchJob: ", status.error_message(), ", ", v1::JobState_Name(last_)));
    }
    Continue();
  }

 private:
  void OnSubmitted(const grpc::Status& status) {
    if (!status.ok()) {
      counts_->Failed(absl::StrCat("SubmitJob: ", status.error_message()));
      return Continue();
    }
    counts_->Submitted(absl::Now() - start_);
    watch_.set_id(job_.id());
    watch_context_ = std::make_unique<grpc::ClientContext>();
    stub_->async()->WatchJob(watch_context_.get(), &watch_, this);
    StartRead(&event_);
    StartCall();
  }

  void Continue() {
    if (!stopping_) return Begin();
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
  }

  v1::VideoGeneration::Stub* const stub_;
  Counts* const counts_;
  const v1::GenerateRequest request_;
  v1::WatchJobRequest watch_;
  v1::Job job_;
  v1::GenerateEvent event_;
  v1::JobState last_ = v1::JOB_STATE_UNSPECIFIED;
  absl::Time start_;
  std::unique_ptr<grpc::ClientContext> submit_context_;
  std::unique_ptr<grpc::ClientContext> watch_context_;
  std::atomic<bool> stopping_ = false;
  absl::Mutex mutex_;
  bool stopped_ = false;
};

// User and system time that a process has used so far.
double CpuSeconds(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string text;
  std::getline(file, text);
  const std::vector<std::string> fields = absl::StrSplit(text.substr(text.rfind(')') + 2), ' ');
  int64_t user = 0;
  int64_t system = 0;
  if (fields.size() < 13 || !absl::SimpleAtoi(fields[11], &user) ||
      !absl::SimpleAtoi(fields[12], &system)) {
    return 0;
  }
  return static_cast<double>(user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double PeakMb(pid_t pid) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(status, line);) {
    absl::string_view value = line;
    int64_t kib = 0;
    if (absl::ConsumePrefix(&value, "VmHWM:") && absl::ConsumeSuffix(&value, "kB") &&
        absl::SimpleAtoi(value, &kib)) {
      return static_cast<double>(kib) * 1024 / 1e6;
    }
  }
  return 0;
}

template <typename T>
T Percentile(const std::vector<T>& ascending, double p) {
  if (ascending.empty()) return T();
  return ascending[std::min(ascending.size() - 1, static_cast<size_t>(p * ascending.size()))];
}

// The times of SubmitJob, ascending, with kWaiting jobs in the queue.
std::vector<absl::Duration> SubmitIntoAFullQueue(const ServedGroup& group, int dp, Counts* counts) {
  const auto submit = [&](v1::VideoGeneration::Stub& stub, const std::string& prompt) {
    grpc::ClientContext context;
    v1::Job job;
    const grpc::Status status = stub.SubmitJob(&context, SmallRequest(prompt), &job);
    if (!status.ok()) counts->Failed(absl::StrCat("SubmitJob: ", status.error_message()));
    return job.id();
  };
  const auto cancel = [&](v1::VideoGeneration::Stub& stub, const std::string& id) {
    grpc::ClientContext context;
    v1::CancelJobRequest request;
    request.set_id(id);
    v1::Job job;
    const grpc::Status status = stub.CancelJob(&context, request, &job);
    if (!status.ok()) counts->Failed(absl::StrCat("CancelJob: ", status.error_message()));
  };
  const auto stub = v1::VideoGeneration::NewStub(group.channel());
  std::vector<std::string> ids;
  for (int i = 0; i < dp; ++i) ids.push_back(submit(*stub, "hold_text:/nowhere"));
  for (int i = 0; i < kWaiting - kProbes; ++i) ids.push_back(submit(*stub, "waiting"));
  absl::Mutex mutex;
  std::vector<absl::Duration> times;
  std::vector<std::thread> probes;
  for (int p = 0; p < kProbes; ++p) {
    probes.emplace_back([&] {
      const auto own = v1::VideoGeneration::NewStub(group.channel());
      for (int i = 0; i < kSubmitsPerProbe; ++i) {
        const absl::Time start = absl::Now();
        const std::string id = submit(*own, "probe");
        const absl::Duration took = absl::Now() - start;
        cancel(*own, id);
        absl::MutexLock lock(&mutex);
        times.push_back(took);
      }
    });
  }
  for (std::thread& probe : probes) probe.join();
  for (const std::string& id : ids) cancel(*stub, id);
  std::sort(times.begin(), times.end());
  return times;
}

int Run(const Flags& flags) {
  auto created = ServedGroup::Create(
      {.dp = flags.dp,
       .arguments = {"--max-waiting=256"},
       .worker = std::filesystem::path(DLO_BINARY_DIR) / "tests" / "scripted-worker"});
  if (!created.ok()) return std::cerr << created.status() << "\n", 1;
  ServedGroup& group = **created;
  if (const absl::Status started = group.Start(); !started.ok()) {
    return std::cerr << started << "\n", 1;
  }
  if (!group.WaitServing(true, absl::Seconds(30))) return std::cerr << group.Log(), 1;

  Counts counts;
  std::vector<std::unique_ptr<v1::VideoGeneration::Stub>> stubs;
  for (int i = 0; i < flags.connections; ++i) {
    stubs.push_back(v1::VideoGeneration::NewStub(group.channel()));
  }
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < flags.outstanding; ++i) {
    clients.push_back(std::make_unique<Client>(stubs[i % stubs.size()].get(), &counts));
    clients.back()->Begin();
  }
  absl::SleepFor(kWarmUp);
  const auto cpu = [&] {
    double workers = 0;
    for (const auto& [rank, pid] : group.Workers()) workers += CpuSeconds(pid);
    return std::vector<double>{CpuSeconds(group.serve_pid()), workers, CpuSeconds(getpid())};
  };
  const std::vector<double> cpu_before = cpu();
  counts.SetCounting(true);
  const absl::Time start = absl::Now();
  absl::SleepFor(absl::Seconds(flags.seconds));
  counts.SetCounting(false);
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  const std::vector<double> cpu_after = cpu();
  const ProcessMemory memory = MemoryOf(group.serve_pid());
  const double peak_mb = PeakMb(group.serve_pid());
  for (const auto& client : clients) client->Stop();
  for (const auto& client : clients) client->Join();
  clients.clear();
  const std::vector<absl::Duration> full_queue = SubmitIntoAFullQueue(group, flags.dp, &counts);
  const Counts::Figures figures = counts.figures();
  stubs.clear();
  if (const auto stopped = group.Stop(); !stopped.ok()) {
    return std::cerr << stopped.status() << "\n", 1;
  }

  const auto ms = [](const std::vector<absl::Duration>& times, double p) {
    return absl::ToDoubleMilliseconds(Percentile(times, p));
  };
  std::cout << absl::StrFormat(
      "%d workers, %d jobs outstanding, %d connections, %.1f s\n"
      "completed            %8.0f jobs/s   (target: 1000)\n"
      "SubmitJob meanwhile  %8.1f ms p50, %.1f ms p99\n"
      "SubmitJob, 64 wait   %8.1f ms p50, %.1f ms p99, %.1f ms worst   (target: p99 20)\n"
      "dlo-serve memory     %8.1f MB resident, %.1f MB proportional, %.1f MB peak   (target: 64)\n"
      "processor time       %8.2f cores dlo-serve, %.2f workers, %.2f clients\n",
      flags.dp, flags.outstanding, flags.connections, seconds,
      static_cast<double>(figures.completed) / seconds, ms(figures.submit_times, 0.5),
      ms(figures.submit_times, 0.99), ms(full_queue, 0.5), ms(full_queue, 0.99), ms(full_queue, 1),
      static_cast<double>(memory.rss_bytes) / 1e6, static_cast<double>(memory.pss_bytes) / 1e6,
      peak_mb, (cpu_after[0] - cpu_before[0]) / seconds, (cpu_after[1] - cpu_before[1]) / seconds,
      (cpu_after[2] - cpu_before[2]) / seconds);
  if (figures.failures > 0) {
    std::cout << figures.failures << " calls failed, the first: " << figures.first_failure << "\n";
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace dlo

int main(int argc, char** argv) {
  CLI::App app(
      "Jobs per second, latency and memory of dlo-serve with workers that answer at once.");
  dlo::Flags flags;
  app.add_option("--seconds", flags.seconds, "of measuring, after the warm-up");
  app.add_option("--dp", flags.dp, "workers");
  app.add_option("--outstanding", flags.outstanding, "jobs submitted and not completed");
  app.add_option("--connections", flags.connections);
  CLI11_PARSE(app, argc, argv);
  return dlo::Run(flags);
}
