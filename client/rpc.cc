#include "client/rpc.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/progress_bar.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace dlo {
namespace {

// The flag that sets a field of GenerateRequest.
std::string FlagOf(const std::string& field) {
  static constexpr std::pair<absl::string_view, absl::string_view> kFlags[] = {
      {"prompt", "--prompt"},
      {"negative_prompt", "--negative-prompt"},
      {"request_id", "--request-id"},
      {"output_format", "--output"},
      {"settings.width", "--width"},
      {"settings.height", "--height"},
      {"settings.num_frames", "--frames"},
      {"settings.fps", "--fps"},
      {"settings.num_inference_steps", "--steps"},
      {"settings.guidance_scale", "--guidance-scale"},
      {"settings.guidance_scale_2", "--guidance-scale-2"},
      {"settings.flow_shift", "--flow-shift"},
      {"settings.solver", "--solver"},
      {"settings.seed", "--seed"},
  };
  for (const auto& [name, flag] : kFlags) {
    if (field == name) return std::string(flag);
  }
  return field;
}

template <typename Detail>
std::optional<Detail> FindDetail(const google::rpc::Status& status) {
  for (const google::protobuf::Any& any : status.details()) {
    Detail detail;
    if (any.UnpackTo(&detail)) return detail;
  }
  return std::nullopt;
}

std::string Violations(const google::rpc::BadRequest& request) {
  std::vector<std::string> parts;
  for (const auto& violation : request.field_violations()) {
    parts.push_back(violation.field().empty()
                        ? violation.description()
                        : absl::StrCat(FlagOf(violation.field()), ": ", violation.description()));
  }
  return absl::StrJoin(parts, "; ");
}

// "Connection refused" of "failed to connect to all addresses; last error: UNKNOWN: ipv4:...:
// Connection refused".
std::string ConnectError(const std::string& message) {
  if (message.find("last error: ") == std::string::npos) return message;
  return message.substr(message.rfind(": ") + 2);
}

std::string Describe(const grpc::Status& status, const CallContext& call) {
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) details.Clear();
  const auto info = FindDetail<google::rpc::ErrorInfo>(details);
  switch (status.error_code()) {
    case grpc::StatusCode::INVALID_ARGUMENT:
      if (auto request = FindDetail<google::rpc::BadRequest>(details);
          request && request->field_violations_size() > 0) {
        return absl::StrCat("invalid request: ", Violations(*request));
      }
      return absl::StrCat("invalid request: ", status.error_message());
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      if (auto retry = FindDetail<google::rpc::RetryInfo>(details)) {
        return absl::StrCat("the server is busy: ", status.error_message(), "; retry in ",
                            HumanDuration(FromProto(retry->retry_delay())));
      }
      break;
    case grpc::StatusCode::UNAVAILABLE:
      if (info.has_value()) break;
      if (call.answered) {
        return absl::StrCat("the connection to ", call.endpoint,
                            " was lost: ", status.error_message());
      }
      return absl::StrCat("no server answers at ", call.endpoint, " (",
                          ConnectError(status.error_message()),
                          "); start one with `dlo-serve`, or name another with --endpoint");
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return absl::StrCat("not finished within --timeout ", absl::FormatDuration(call.timeout));
    case grpc::StatusCode::UNIMPLEMENTED:
      return absl::StrCat("the server at ", call.endpoint,
                          " does not offer this service: ", status.error_message());
    default:
      break;
  }
  std::string line = status.error_message();
  if (line.empty()) line = absl::StrCat("the server failed with code ", status.error_code());
  if (info.has_value()) {
    absl::StrAppend(&line, " (", info->reason());
    if (auto rank = info->metadata().find("rank"); rank != info->metadata().end()) {
      absl::StrAppend(&line, ", rank ", rank->second);
    }
    absl::StrAppend(&line, ")");
  }
  return line;
}

}  // namespace

std::shared_ptr<grpc::Channel> OpenChannel(const std::string& endpoint) {
  grpc::ChannelArguments arguments;
  // A proxy meant for the web must not come between a client and a server on the same host.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // A server that is just starting is met soon after it listens.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
  // A request may be silent for minutes; a server whose machine is gone is noticed all the same.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  return grpc::CreateCustomChannel(endpoint, grpc::InsecureChannelCredentials(), arguments);
}

absl::Status DescribeError(const grpc::Status& status, const CallContext& call) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                      OneLine(Describe(status, call)));
}

std::string OneLine(absl::string_view text) {
  std::string line(text);
  for (char& c : line) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) c = ' ';
  }
  absl::RemoveExtraAsciiWhitespace(&line);
  return line;
}

absl::Duration FromProto(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

}  // namespace dlo
