// What a client may send that is no valid message, over a real connection.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <future>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/raw_messages.h"
#include "server/testing/frontend_harness.h"

namespace dlo {
namespace {

using grpc::StatusCode;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr const char* kMethods[] = {"Generate", "SubmitJob",      "GetJob",    "ListJobs",
                                    "WatchJob", "DownloadResult", "CancelJob", "DeleteJob"};

std::string Field(int number, const std::string& bytes) {
  return absl::StrCat(std::string(1, static_cast<char>(number << 3 | 2)),
                      std::string(1, static_cast<char>(bytes.size())), bytes);
}

// The status of a call whose request is `bytes`, whatever they are.
grpc::Status CallWith(FrontendHarness& harness, const std::string& method,
                      const std::string& bytes) {
  grpc::GenericStub stub(harness.channel());
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(absl::ToChronoTime(absl::Now() + kTestTimeout));
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  std::promise<grpc::Status> done;
  // A refused stream looks like a refused unary call: a status alone.
  stub.UnaryCall(&context, absl::StrCat("/dlo.v1.VideoGeneration/", method), {}, &request,
                 &response, [&](grpc::Status status) { done.set_value(std::move(status)); });
  return done.get_future().get();
}

std::vector<std::string> WrongFields(const grpc::Status& status) {
  std::vector<std::string> fields;
  const auto detail = Detail<google::rpc::BadRequest>(status);
  for (const auto& violation : detail.field_violations()) fields.push_back(violation.field());
  return fields;
}

TEST(RawRequestsTest, TextThatIsNotUtf8IsRefusedByEveryCallWithTheFieldsName) {
  FrontendHarness harness;
  harness.Start();
  for (const std::string method : kMethods) {
    const bool generates = method == "Generate" || method == "SubmitJob";
    // The second field of ListJobs is a text, the first one of all others.
    const grpc::Status status =
        CallWith(harness, method, Field(method == "ListJobs" ? 2 : 1, "a\xC3("));
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << method;
    EXPECT_THAT(status.error_message(), HasSubstr("is not valid UTF-8 at byte 1")) << method;
    EXPECT_THAT(WrongFields(status), ElementsAre(generates              ? "request_id"
                                                 : method == "ListJobs" ? "page_token"
                                                                        : "id"))
        << method;
  }
}

TEST(RawRequestsTest, EveryWrongTextIsNamedAlsoInsideOtherMessages) {
  FrontendHarness harness;
  harness.Start();
  const std::string settings = Field(9, "\xFF");                // solver
  const std::string value = Field(3, "\xE2\x82");               // string_value
  const std::string entry = Field(1, "key") + Field(2, value);  // of Struct.fields
  const grpc::Status status = CallWith(
      harness, "SubmitJob",
      Field(2, "fine") + Field(3, "\x80") + Field(4, settings) + Field(8, Field(1, entry)));
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(WrongFields(status),
              ElementsAre("negative_prompt", "settings.solver", "extra.fields.value.string_value"));
}

TEST(RawRequestsTest, BytesThatAreNoMessageAreRefusedByEveryCall) {
  FrontendHarness harness;
  harness.Start();
  for (const std::string method : kMethods) {
    for (const std::string& bytes : {std::string("\x0A\x05zz"),            // cut inside a field
                                     std::string("\xFF\xFF\xFF\xFF\xFF"),  // a tag without end
                                     std::string("\0\0", 2), std::string("\x0B\x0B")}) {
      const grpc::Status status = CallWith(harness, method, bytes);
      EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << method;
      EXPECT_THAT(status.error_message(), HasSubstr("the request's bytes are not a dlo.v1."))
          << method;
      EXPECT_THAT(status.error_details(), IsEmpty()) << method;
    }
  }
}

TEST(RawRequestsTest, AMessageNestedBeyondProtobufsLimitIsRefused) {
  FrontendHarness harness;
  harness.Start();
  // List values in list values.
  google::protobuf::Struct extra;
  google::protobuf::Value* value = &(*extra.mutable_fields())["deep"];
  for (int i = 0; i < 200; ++i) value = value->mutable_list_value()->add_values();
  value->set_null_value(google::protobuf::NULL_VALUE);
  v1::GenerateRequest request = FrontendHarness::Request("x");
  *request.mutable_extra() = extra;
  const grpc::Status status = CallWith(harness, "SubmitJob", request.SerializeAsString());
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
}

TEST(RawRequestsTest, FieldsOfALaterVersionArePassedOver) {
  v1::GetJobRequest request;
  const std::string bytes = Field(15, "\xFF\xFE") + Field(1, "an-id") + "\x68\x05";
  const grpc::Slice slice(bytes);
  const grpc::Status status = ParseRequest(grpc::ByteBuffer(&slice, 1), &request);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(request.id(), "an-id");
}

}  // namespace
}  // namespace dlo
