// Several workers that each serve requests of their own (dp without weight collectives).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "server/testing/frontend_harness.h"

namespace dlo {
namespace {

using grpc::StatusCode;
using grpc::health::v1::HealthCheckResponse;

TEST(ReplicasTest, AsManyRequestsRunAtATimeAsThereAreReplicas) {
  FrontendHarness harness;
  harness.options().domains = IndependentReplicas(3);
  harness.Start();
  std::vector<std::unique_ptr<TestCall>> running;
  for (const char* id : {"a", "b", "c"}) {
    running.push_back(std::make_unique<TestCall>(
        harness.channel(), FrontendHarness::Request("hold_step=1:" + harness.Path("go"), id)));
  }
  for (auto& call : running) ASSERT_TRUE(call->ReadUntilStep(1));
  TestCall waiting(harness.channel(), FrontendHarness::Request("x", "d"));
  ASSERT_TRUE(waiting.ReadUntilState(v1::JOB_STATE_QUEUED));
  EXPECT_EQ(waiting.last_job().progress().queue_position(), 1);
  harness.Touch("go");
  std::vector<int> ranks;
  for (auto& call : running) {
    EXPECT_TRUE(call->Finish().ok());
    ranks.push_back(call->last_job().result().ranks(0).rank());
  }
  EXPECT_THAT(ranks, testing::UnorderedElementsAre(0, 1, 2));
  EXPECT_TRUE(waiting.Finish().ok());
}

TEST(ReplicasTest, OneReadyReplicaIsEnoughToServe) {
  FrontendHarness harness;
  harness.options().domains = IndependentReplicas(2);
  harness.options().supervisor.worker_arguments = {"--load-hold=" + harness.Path("loaded-%r")};
  harness.Start();
  EXPECT_EQ(harness.Health(), HealthCheckResponse::NOT_SERVING);
  harness.Touch("loaded-1");
  ASSERT_TRUE(harness.WaitServing(true));
  EXPECT_EQ(harness.Health(), HealthCheckResponse::SERVING);
  TestCall call(harness.channel(), FrontendHarness::Request("x"));
  EXPECT_TRUE(call.Finish().ok());
  EXPECT_EQ(call.last_job().result().ranks(0).rank(), 1);
  std::filesystem::remove(harness.Path("loaded-1"));
  kill(FrontendHarness::WorkerPid(1), SIGKILL);
  ASSERT_TRUE(harness.WaitServing(false));
  harness.Touch("loaded-0");
  ASSERT_TRUE(harness.WaitServing(true));
}

TEST(ReplicasTest, ALostReplicaEndsItsOwnRequestOnlyAndComesBack) {
  FrontendHarness harness;
  harness.options().domains = IndependentReplicas(2);
  harness.Start();
  TestCall a(harness.channel(), FrontendHarness::Request("hold_step=1:" + harness.Path("go"), "a"));
  TestCall b(harness.channel(), FrontendHarness::Request("hold_step=1:" + harness.Path("go"), "b"));
  ASSERT_TRUE(a.ReadUntilStep(1));
  ASSERT_TRUE(b.ReadUntilStep(1));
  const int pid = FrontendHarness::WorkerPid(1);
  ASSERT_GT(pid, 0);
  ASSERT_EQ(kill(pid, SIGKILL), 0);
  harness.Touch("go");
  int lost = 0;
  for (TestCall* call : {&a, &b}) {
    const grpc::Status status = call->Finish();
    if (status.ok()) {
      EXPECT_EQ(call->last_job().result().ranks(0).rank(), 0);
      continue;
    }
    ++lost;
    EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
    EXPECT_EQ(Detail<google::rpc::ErrorInfo>(status).metadata().at("rank"), "1");
  }
  EXPECT_EQ(lost, 1);
  // Two at a time again.
  TestCall c(harness.channel(), FrontendHarness::Request("hold_step=1:" + harness.Path("go2")));
  TestCall d(harness.channel(), FrontendHarness::Request("hold_step=1:" + harness.Path("go2")));
  ASSERT_TRUE(c.ReadUntilStep(1));
  ASSERT_TRUE(d.ReadUntilStep(1));
  harness.Touch("go2");
  EXPECT_TRUE(c.Finish().ok());
  EXPECT_TRUE(d.Finish().ok());
}

}  // namespace
}  // namespace dlo
