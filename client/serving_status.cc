#include "client/serving_status.h"

#include <grpcpp/client_context.h>

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/rpc.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace dlo {
namespace {

constexpr absl::Duration kPollInterval = absl::Milliseconds(50);
constexpr absl::Duration kCallTimeout = absl::Seconds(5);

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
  auto stub = ::grpc::health::v1::Health::NewStub(OpenChannel(options.endpoint));
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
      return absl::OkStatus();
    }
    answered |= status.ok();
    if (waits) interrupt.WaitFor(std::min(kPollInterval, deadline - absl::Now()));
  } while (absl::Now() < deadline);

  if (answered) {
    *console.out << "NOT_SERVING" << std::endl;
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
