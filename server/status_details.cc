#include "server/status_details.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "proto/convert.h"

namespace dlo {
namespace {

constexpr size_t kMessageBytesMax = 500;
constexpr size_t kFieldBytesMax = 100;
constexpr size_t kDescriptionBytesMax = 400;
constexpr size_t kViolationsBytesMax = 5000;

grpc::Status WithDetails(grpc::StatusCode code, const std::string& message,
                         const google::protobuf::Message& detail) {
  google::rpc::Status status;
  status.set_code(code);
  status.set_message(Clip(message, kMessageBytesMax));
  status.add_details()->PackFrom(detail);
  return grpc::Status(code, status.message(), status.SerializeAsString());
}

}  // namespace

std::string Clip(const std::string& text, size_t bytes_max) {
  if (text.size() <= bytes_max) return text;
  size_t end = bytes_max - std::min<size_t>(bytes_max, 3);
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end) + "...";
}

grpc::Status BadRequestStatus(const std::vector<FieldViolation>& violations) {
  google::rpc::BadRequest detail;
  std::string fields;
  size_t bytes = 0;
  for (const FieldViolation& violation : violations) {
    const std::string field = Clip(violation.field, kFieldBytesMax);
    const std::string description = Clip(violation.description, kDescriptionBytesMax);
    bytes += field.size() + description.size();
    if (bytes > kViolationsBytesMax) {
      auto* rest = detail.add_field_violations();
      rest->set_description(absl::StrCat(violations.size() - detail.field_violations_size() + 1,
                                         " more wrong fields are not listed"));
      break;
    }
    auto* entry = detail.add_field_violations();
    entry->set_field(field);
    entry->set_description(description);
    absl::StrAppend(&fields, fields.empty() ? "" : "; ", field, ": ", description);
  }
  return WithDetails(grpc::StatusCode::INVALID_ARGUMENT, fields, detail);
}

grpc::Status QueueFullStatus(int waiting_max, absl::Duration retry_delay) {
  google::rpc::RetryInfo detail;
  *detail.mutable_retry_delay() = ToProto(retry_delay);
  return WithDetails(grpc::StatusCode::RESOURCE_EXHAUSTED,
                     absl::StrCat("the queue is full (queue.max_waiting is ", waiting_max, ")"),
                     detail);
}

grpc::Status StatusWithReason(grpc::StatusCode code, const std::string& reason,
                              const std::string& message,
                              const std::map<std::string, std::string>& metadata) {
  google::rpc::ErrorInfo detail;
  detail.set_reason(reason);
  detail.set_domain(kErrorDomain);
  for (const auto& [key, value] : metadata) (*detail.mutable_metadata())[key] = value;
  return WithDetails(code, message, detail);
}

std::string ReasonOf(const grpc::Status& status) {
  google::rpc::Status details;
  if (details.ParseFromString(status.error_details())) {
    google::rpc::ErrorInfo info;
    for (const google::protobuf::Any& any : details.details()) {
      if (any.UnpackTo(&info)) return info.reason();
    }
  }
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code()));
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

}  // namespace dlo
