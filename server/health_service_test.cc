#include "server/health_service.h"

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace dlo {
namespace {

using grpc::health::v1::Health;
using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

class HealthServiceTest : public testing::Test {
 protected:
  HealthServiceTest() {
    grpc::ServerBuilder builder;
    builder.RegisterService(&health_);
    server_ = builder.BuildAndStart();
    stub_ = Health::NewStub(server_->InProcessChannel({}));
  }
  ~HealthServiceTest() override {
    server_->Shutdown(absl::ToChronoTime(absl::Now()));
    server_->Wait();
  }

  static HealthCheckRequest Of(const std::string& service) {
    HealthCheckRequest request;
    request.set_service(service);
    return request;
  }
  // SERVICE_UNKNOWN for NOT_FOUND.
  HealthCheckResponse::ServingStatus Check(const std::string& service) {
    grpc::ClientContext context;
    HealthCheckResponse response;
    const grpc::Status status = stub_->Check(&context, Of(service), &response);
    if (status.error_code() == grpc::StatusCode::NOT_FOUND) {
      return HealthCheckResponse::SERVICE_UNKNOWN;
    }
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.status();
  }

  HealthService health_{{"a.Service"}};
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Health::Stub> stub_;
};

TEST_F(HealthServiceTest, DoesNotServeUntilItIsToldAndNeverAfterItsShutdown) {
  for (const char* name : {"", "a.Service"}) {
    EXPECT_EQ(Check(name), HealthCheckResponse::NOT_SERVING);
  }
  health_.SetServing(true);
  for (const char* name : {"", "a.Service"}) EXPECT_EQ(Check(name), HealthCheckResponse::SERVING);
  health_.Shutdown();
  health_.SetServing(true);
  for (const char* name : {"", "a.Service"}) {
    EXPECT_EQ(Check(name), HealthCheckResponse::NOT_SERVING);
  }
}

TEST_F(HealthServiceTest, ANameThatIsNotKnownIsNotFound) {
  health_.SetServing(true);
  EXPECT_EQ(Check("b.Service"), HealthCheckResponse::SERVICE_UNKNOWN);
}

TEST_F(HealthServiceTest, AWatcherIsToldWhatIsAndEveryChange) {
  grpc::ClientContext context;
  const auto reader = stub_->Watch(&context, Of("a.Service"));
  HealthCheckResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  health_.SetServing(false);  // no change
  for (const bool serving : {true, false, true}) {
    health_.SetServing(serving);
    ASSERT_TRUE(reader->Read(&response));
    EXPECT_EQ(response.status(),
              serving ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING);
  }
  health_.Shutdown();
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(HealthServiceTest, AWatcherOfAnUnknownNameIsToldSo) {
  grpc::ClientContext context;
  const auto reader = stub_->Watch(&context, Of("b.Service"));
  HealthCheckResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::SERVICE_UNKNOWN);
  // A watcher that is still there does not keep the server.
}

}  // namespace
}  // namespace dlo
