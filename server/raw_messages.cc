#include "server/raw_messages.h"

#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/proto_buffer_writer.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/utf8.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/io/coded_stream.h"
#include "models/model_card.h"
#include "server/status_details.h"

namespace dlo {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::io::CodedInputStream;

// As deep as protobuf's own parser goes.
constexpr int kDepthMax = 100;

// Of the wire format, https://protobuf.dev/programming-guides/encoding/.
enum WireType { kVarint = 0, kFixed64 = 1, kLengthDelimited = 2, kFixed32 = 5 };

// Looks at the text fields of one encoded message. It tells text from other bytes by the message's
// descriptor, and stops at the first thing that is not as the wire format wants it.
class TextCheck {
 public:
  explicit TextCheck(std::vector<FieldViolation>* wrong) : wrong_(*wrong) {}

  // False: it stopped.
  bool CheckMessage(CodedInputStream& in, const Descriptor& type, const std::string& path,
                    int depth) {
    while (const uint32_t tag = in.ReadTag()) {
      const int number = static_cast<int>(tag >> 3);
      switch (tag & 7) {
        case kVarint: {
          uint64_t value;
          if (!in.ReadVarint64(&value)) return false;
          break;
        }
        case kFixed64:
          if (!in.Skip(8)) return false;
          break;
        case kFixed32:
          if (!in.Skip(4)) return false;
          break;
        case kLengthDelimited:
          if (!CheckField(in, type.FindFieldByNumber(number), path, depth)) return false;
          break;
        default:
          return false;  // groups, which no message of ours has
      }
    }
    return in.ConsumedEntireMessage();
  }

 private:
  bool CheckField(CodedInputStream& in, const FieldDescriptor* field, const std::string& parent,
                  int depth) {
    uint32_t size;
    if (!in.ReadVarint32(&size) || size > static_cast<uint32_t>(INT32_MAX)) return false;
    const int bytes = static_cast<int>(size);
    // A string would make room for all that it says it has.
    if (bytes > in.BytesUntilLimit()) return false;
    if (field == nullptr) return in.Skip(bytes);
    const std::string path =
        parent.empty() ? field->name() : absl::StrCat(parent, ".", field->name());
    if (field->type() == FieldDescriptor::TYPE_STRING) {
      std::string text;
      if (!in.ReadString(&text, bytes)) return false;
      if (const size_t at = FindInvalidUtf8(text); at != std::string::npos) {
        wrong_.push_back({path, absl::StrCat(field->name(), " is not valid UTF-8 at byte ", at,
                                             "; send text encoded as UTF-8")});
      }
      return true;
    }
    if (field->type() != FieldDescriptor::TYPE_MESSAGE) return in.Skip(bytes);
    if (depth == 0) return false;
    const CodedInputStream::Limit limit = in.PushLimit(bytes);
    if (!CheckMessage(in, *field->message_type(), path, depth - 1)) return false;
    in.PopLimit(limit);
    return true;
  }

  std::vector<FieldViolation>& wrong_;
};

}  // namespace

grpc::Status ParseRequest(const grpc::ByteBuffer& body, google::protobuf::Message* request) {
  // A copy of the buffer shares its bytes.
  grpc::ByteBuffer bytes = body;
  std::vector<FieldViolation> wrong;
  {
    grpc::ProtoBufferReader reader(&bytes);
    if (reader.status().ok()) {
      CodedInputStream in(&reader);
      in.PushLimit(static_cast<int>(bytes.Length()));
      TextCheck(&wrong).CheckMessage(in, *request->GetDescriptor(), "", kDepthMax);
    }
  }
  if (!wrong.empty()) return BadRequestStatus(wrong);
  grpc::ProtoBufferReader reader(&bytes);
  if (!reader.status().ok() || !request->ParseFromZeroCopyStream(&reader)) {
    return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT,
                        absl::StrCat("the request's bytes are not a ",
                                     request->GetDescriptor()->full_name(), " message"));
  }
  return grpc::Status::OK;
}

grpc::ByteBuffer SerializeResponse(const google::protobuf::Message& response) {
  grpc::ByteBuffer bytes;
  bool owned = false;
  // Fails for nothing below protobuf's 2 GiB.
  grpc::SerializationTraits<google::protobuf::Message>::Serialize(response, &bytes, &owned);
  return bytes;
}

}  // namespace dlo
