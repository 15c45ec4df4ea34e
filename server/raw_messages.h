// Between the messages of the public API and the bytes that travel.
//
//   v1::GetJobRequest request;
//   const grpc::Status status = ParseRequest(body, &request);
//
// In place of what gRPC's generated handlers do, which answer UNIMPLEMENTED for a text field that
// is not UTF-8, with nothing that says which one. Stateless; any thread.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include "google/protobuf/message.h"

namespace dlo {

// Fills `request`. INVALID_ARGUMENT with a BadRequest that names each text field that is not UTF-8
// by its path ("settings.solver"); without one for bytes that are no message of the request's type.
grpc::Status ParseRequest(const grpc::ByteBuffer& body, google::protobuf::Message* request);

grpc::ByteBuffer SerializeResponse(const google::protobuf::Message& response);

}  // namespace dlo
