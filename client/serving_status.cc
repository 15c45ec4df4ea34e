#include "client/serving_status.h"

#include <grpcpp/client_context.h>

#include <algorithm>
#include <memory>
#include <ostream>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "client/rpc.h"
#include "dlo/v1/video_generation.grpc.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace dlo {
namespace {

constexpr absl::Duration kPollInterval = absl::Milliseconds(50);
constexpr absl::Duration kCallTimeout = absl::Seconds(5);

std::string Text(double value, const char* unit) { return absl::StrFormat("%.1f %s", value, unit); }

std::string Megabytes(int64_t bytes) { return Text(static_cast<double>(bytes) / 1e6, "MB"); }

std::string Seconds(const google::protobuf::Duration& time) {
  return Text(absl::ToDoubleSeconds(FromProto(time)), "s");
}

void PrintRank(const v1::RankStatus& rank, std::ostream& out) {
  out << "rank " << rank.rank() << ": " << (rank.ready() ? "ready" : "not ready");
  if (!rank.has_startup()) {
    out << std::endl;
    return;
  }
  const v1::StartupRecord& startup = rank.startup();
  out << "; weights: " << OneLine(startup.outcome()) << " (" << OneLine(startup.mode()) << ") in "
      << Seconds(startup.duration()) << ", " << Megabytes(startup.read_bytes()) << " read, "
      << Megabytes(startup.mapped_bytes()) << " mapped";
  if (startup.has_publication()) {
    out << "; publication: " << OneLine(startup.publication().outcome());
    if (!startup.publication().reason().empty()) {
      out << " (" << OneLine(startup.publication().reason()) << ")";
    }
  }
  out << std::endl;
  for (const v1::StartupAttempt& attempt : startup.attempts()) {
    if (attempt.reason().empty()) continue;
    out << "  " << OneLine(attempt.stage()) << ": " << OneLine(attempt.result()) << " ("
        << OneLine(attempt.reason()) << (attempt.retryable() ? ", retryable" : "") << "), then "
        << OneLine(attempt.next());
    if (!attempt.message().empty()) out << ": " << OneLine(attempt.message());
    out << std::endl;
  }
  for (const v1::HostWeights& weights : startup.host_weights()) {
    out << "  " << OneLine(weights.component()) << ": " << OneLine(weights.backing());
    if (!weights.reason().empty()) {
      out << " (" << OneLine(weights.reason()) << "): " << OneLine(weights.message());
    }
    out << std::endl;
  }
}

// A server that cannot be asked has said SERVING or NOT_SERVING all the same.
void PrintRanks(const std::shared_ptr<grpc::Channel>& channel, const Console& console) {
  const auto stub = v1::VideoGeneration::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kCallTimeout));
  v1::ServerStatus status;
  if (!stub->GetStatus(&context, {}, &status).ok()) return;
  for (const v1::RankStatus& rank : status.ranks()) PrintRank(rank, *console.out);
}

grpc::Status Ask(::grpc::health::v1::Health::Stub& stub, absl::Duration timeout,
                 bool wait_for_ready, Interrupt& interrupt,
                 ::grpc::health::v1::HealthCheckResponse* response) {
  grpc::ClientContext context;
  context.set_wait_for_ready(wait_for_ready);
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  interrupt.Subscribe([&context] { context.TryCancel(); });
  absl::Cleanup unsubscribe = [&] { interrupt.Unsubscribe(); };
  return stub.Check(&context, {}, response);
}

}  // namespace

absl::Status CheckServing(const StatusOptions& options, const Console& console,
                          Interrupt& interrupt) {
  using Response = ::grpc::health::v1::HealthCheckResponse;
  const std::shared_ptr<grpc::Channel> channel = OpenChannel(options.endpoint);
  auto stub = ::grpc::health::v1::Health::NewStub(channel);
  const absl::Time deadline = absl::Now() + options.wait;
  const bool waits = options.wait > absl::ZeroDuration();
  bool answered = false;
  grpc::Status status;
  do {
    const absl::Duration left = deadline - absl::Now();
    const absl::Duration timeout =
        waits ? std::clamp(left, absl::Milliseconds(1), kCallTimeout) : kCallTimeout;
    Response response;
    status = Ask(*stub, timeout, waits, interrupt, &response);
    if (interrupt.signal() != 0) return absl::CancelledError("interrupted");
    if (status.ok() && response.status() == Response::SERVING) {
      *console.out << "SERVING" << std::endl;
      PrintRanks(channel, console);
      return absl::OkStatus();
    }
    answered |= status.ok();
    if (waits) interrupt.WaitFor(std::min(kPollInterval, deadline - absl::Now()));
  } while (absl::Now() < deadline);

  if (answered) {
    *console.out << "NOT_SERVING" << std::endl;
    PrintRanks(channel, console);
    return absl::FailedPreconditionError(
        absl::StrCat("the server at ", options.endpoint, " is up but not ready"));
  }
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    return absl::UnavailableError(absl::StrCat("no server answers at ", options.endpoint,
                                               "; start one with `dlo-serve`, or name another with "
                                               "--endpoint"));
  }
  return DescribeError(status, {.endpoint = options.endpoint});
}

}  // namespace dlo
