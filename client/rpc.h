// What all commands share of gRPC: the channel, and errors as one line for people.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/support/status.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "google/protobuf/duration.pb.h"

namespace dlo {

inline constexpr char kDefaultEndpoint[] = "127.0.0.1:50051";

// "HOST:PORT", "unix:PATH" and gRPC's other names. Never fails; the first call does.
std::shared_ptr<grpc::Channel> OpenChannel(const std::string& endpoint);

struct CallContext {
  std::string endpoint;
  bool answered = false;   // the server has sent something
  absl::Duration timeout;  // the call's deadline, for the message
};

// The same code, with a message of one line that says what to do: each field violation of a
// BadRequest under the name of its flag, the reason of an ErrorInfo, the delay of a RetryInfo, how
// to start a server where none answers.
absl::Status DescribeError(const grpc::Status& status, const CallContext& call);

// `text` without line breaks and control characters: what a server sends must not steer a terminal.
std::string OneLine(absl::string_view text);

absl::Duration FromProto(const google::protobuf::Duration& duration);

}  // namespace dlo
