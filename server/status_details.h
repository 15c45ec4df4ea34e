// gRPC statuses with google.rpc details, as the public API promises them.
//
//   return StatusWithReason(grpc::StatusCode::UNAVAILABLE, "RANK_LOST",
//                           "rank 0 was killed by signal 9", {{"rank", "0"}});
#pragma once

#include <grpcpp/support/status.h>

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "models/model_card.h"

namespace dlo {

// The `domain` of every ErrorInfo.
inline constexpr char kErrorDomain[] = "dlo";

// Why a waiting or running job ends when the server stops.
inline constexpr char kShuttingDownReason[] = "SHUTTING_DOWN";

// INVALID_ARGUMENT with a BadRequest. Long texts and lists are cut so that the details fit into the
// trailing metadata that a client accepts by default (8 KiB).
grpc::Status BadRequestStatus(const std::vector<FieldViolation>& violations);

// RESOURCE_EXHAUSTED with RetryInfo.
grpc::Status QueueFullStatus(int waiting_max, absl::Duration retry_delay);

// Any code with an ErrorInfo.
grpc::Status StatusWithReason(grpc::StatusCode code, const std::string& reason,
                              const std::string& message,
                              const std::map<std::string, std::string>& metadata = {});

grpc::Status ToGrpcStatus(const absl::Status& status);

// The reason of a status's ErrorInfo; without one the name of its code.
std::string ReasonOf(const grpc::Status& status);

// The longest prefix of `text` of at most `bytes_max` bytes that does not cut a UTF-8 sequence,
// with "..." where it was cut.
std::string Clip(const std::string& text, size_t bytes_max);

}  // namespace dlo
