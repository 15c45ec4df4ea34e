#include "server/frontend.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/sha256.h"
#include "proto/convert.h"
#include "server/testing/frontend_harness.h"

namespace dlo {
namespace {

using grpc::StatusCode;
using grpc::health::v1::HealthCheckResponse;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::SizeIs;

// 128 frames of 128x128: 25 MB of float32.
v1::GenerateRequest BigRequest() {
  v1::GenerateRequest request = FrontendHarness::Request("big");
  request.mutable_settings()->set_width(128);
  request.mutable_settings()->set_height(128);
  request.mutable_settings()->set_num_frames(128);
  return request;
}

TEST(FrontendTest, StreamsStatesStepsAndTheVideoInOrder) {
  FrontendHarness harness;
  harness.Start();
  for (v1::OutputFormat format : {v1::OUTPUT_FORMAT_UNSPECIFIED, v1::OUTPUT_FORMAT_PNG_SHEET,
                                  v1::OUTPUT_FORMAT_SAFETENSORS}) {
    const std::string id = absl::StrCat("job-", format);
    v1::GenerateRequest request = FrontendHarness::Request("a prompt", id);
    request.set_output_format(format);
    TestCall call(harness.channel(), request);
    const grpc::Status status = call.Finish();
    ASSERT_TRUE(status.ok()) << status.error_message();

    std::vector<std::string> order;
    for (const v1::GenerateEvent& event : call.events()) {
      if (event.has_job()) order.push_back(v1::JobState_Name(event.job().state()));
      if (event.has_progress() && event.progress().queue_position() == 0) {
        order.push_back(absl::StrCat("step ", event.progress().step()));
      }
      if (event.has_chunk() && order.back() != "chunk") order.push_back("chunk");
    }
    EXPECT_THAT(order,
                ElementsAre("JOB_STATE_QUEUED", "JOB_STATE_ADMITTED", "JOB_STATE_ENCODING_TEXT",
                            "JOB_STATE_DENOISING", "step 1", "step 2", "step 3", "step 4",
                            "JOB_STATE_DECODING", "chunk", "JOB_STATE_SUCCEEDED"));
    const v1::Job& job = call.last_job();
    EXPECT_EQ(job.id(), id);
    EXPECT_EQ(job.settings().num_inference_steps(), 4);
    EXPECT_EQ(job.settings().solver(), "unipc");
    EXPECT_EQ(job.result().size_bytes(), static_cast<int64_t>(call.video().size()));
    EXPECT_EQ(job.result().sha256(), Sha256Of(call.video()));
    EXPECT_FALSE(job.result().media_type().empty());
    EXPECT_GE(FromProto(job.end_time()), FromProto(job.start_time()));
    EXPECT_GE(FromProto(job.start_time()), FromProto(job.create_time()));
    ASSERT_EQ(job.result().ranks_size(), 1);
    EXPECT_GT(job.result().ranks(0).host_bytes_peak(), 1 << 20);
    EXPECT_TRUE(job.result().times().has_decode());
  }
}

TEST(FrontendTest, StatusTellsOfEachRankWhetherItIsReadyAndHowItsLoadWent) {
  FrontendHarness harness({"--startup-record"});
  harness.options().domains = IndependentReplicas(2);
  harness.options().supervisor.worker_arguments.push_back("--load-hold=" + harness.Path("load.%r"));
  const auto status = [&harness] {
    const auto stub = v1::VideoGeneration::NewStub(harness.channel());
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    v1::ServerStatus answer;
    EXPECT_TRUE(stub->GetStatus(&context, {}, &answer).ok());
    return answer;
  };
  harness.Start();
  const v1::ServerStatus loading = status();
  EXPECT_FALSE(loading.serving());
  ASSERT_EQ(loading.ranks_size(), 2);
  EXPECT_EQ(loading.ranks(1).rank(), 1);
  EXPECT_FALSE(loading.ranks(1).ready());
  EXPECT_FALSE(loading.ranks(1).has_startup());

  harness.Touch("load.1");
  ASSERT_TRUE(harness.WaitServing(true));
  const v1::ServerStatus one = status();
  EXPECT_TRUE(one.serving());
  EXPECT_FALSE(one.ranks(0).ready());
  EXPECT_TRUE(one.ranks(1).ready());
  const v1::StartupRecord& record = one.ranks(1).startup();
  EXPECT_EQ(record.mode(), "preferred");
  EXPECT_EQ(record.outcome(), "canonical-fallback");
  EXPECT_EQ(record.resolution_id(), "scripted");
  EXPECT_EQ(record.read_bytes(), 4096);
  ASSERT_EQ(record.attempts_size(), 1);
  EXPECT_EQ(record.attempts(0).stage(), "lookup");
  EXPECT_EQ(record.attempts(0).result(), "miss");
  EXPECT_EQ(record.attempts(0).reason(), "miss");
  EXPECT_EQ(record.attempts(0).next(), "canonical-fallback");
  EXPECT_TRUE(record.attempts(0).retryable());
  EXPECT_EQ(record.publication().outcome(), "published");
  EXPECT_EQ(record.publication().bytes(), 2048);
  ASSERT_EQ(record.host_weights_size(), 1);
  EXPECT_EQ(record.host_weights(0).backing(), "memory");
  const auto load = std::find_if(record.phases().begin(), record.phases().end(),
                                 [](const auto& phase) { return phase.phase() == "load"; });
  ASSERT_NE(load, record.phases().end());
  EXPECT_EQ(load->time().seconds(), 2);
}

TEST(FrontendTest, ALoadThatFailsHasARecordToo) {
  FrontendHarness harness({"--load-error=no such model"});
  harness.Start();
  EXPECT_FALSE(harness.WaitFailure().ok());
  const auto stub = v1::VideoGeneration::NewStub(harness.channel());
  grpc::ClientContext context;
  v1::ServerStatus status;
  ASSERT_TRUE(stub->GetStatus(&context, {}, &status).ok());
  EXPECT_FALSE(status.ranks(0).ready());
  EXPECT_EQ(status.ranks(0).startup().outcome(), "failed");
}

TEST(FrontendTest, NamesEveryWrongFieldBeforeAnyWorkerIsReady) {
  FrontendHarness harness;
  harness.options().supervisor.worker_arguments = {"--load-hold=" + harness.Path("never")};
  harness.Start();
  v1::GenerateRequest request = FrontendHarness::Request("", "not ok!");
  request.mutable_settings()->set_width(17);
  request.mutable_settings()->set_height(-16);
  request.set_output_format(static_cast<v1::OutputFormat>(99));
  (*request.mutable_extra()->mutable_fields())["colour"].set_string_value("red");
  TestCall call(harness.channel(), request);
  const grpc::Status status = call.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(call.events().empty());
  const auto detail = Detail<google::rpc::BadRequest>(status);
  std::vector<std::string> fields;
  for (const auto& violation : detail.field_violations()) {
    fields.push_back(violation.field());
  }
  EXPECT_THAT(fields, ElementsAre("request_id", "prompt", "settings.width", "settings.height",
                                  "output_format", "extra.colour"));
}

TEST(FrontendTest, AVeryLongListOfWrongFieldsFitsIntoTheMetadata) {
  FrontendHarness harness;
  harness.Start();
  v1::GenerateRequest request = FrontendHarness::Request("");
  for (int i = 0; i < 500; ++i) {
    (*request.mutable_extra()->mutable_fields())[std::string(200, 'x') + std::to_string(i)];
  }
  const grpc::Status status = TestCall(harness.channel(), request).Finish();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  const auto detail = Detail<google::rpc::BadRequest>(status);
  EXPECT_EQ(detail.field_violations(0).field(), "prompt");
  EXPECT_THAT(detail.field_violations().rbegin()->description(), HasSubstr("more wrong fields"));
}

TEST(FrontendTest, RunsRequestsInTheOrderOfTheirArrivalAndTellsThePosition) {
  FrontendHarness harness;
  harness.Start();
  const auto first = harness.RunUntilStep(1, "go", "first");
  TestCall second(harness.channel(),
                  FrontendHarness::Request("hold_step=1:" + harness.Path("go2"), "second"));
  ASSERT_TRUE(second.ReadUntilState(v1::JOB_STATE_QUEUED));
  EXPECT_EQ(second.last_job().progress().queue_position(), 1);
  TestCall third(harness.channel(), FrontendHarness::Request("x", "third"));
  ASSERT_TRUE(third.ReadUntilState(v1::JOB_STATE_QUEUED));
  EXPECT_EQ(third.last_job().progress().queue_position(), 2);
  harness.Touch("go");
  EXPECT_TRUE(first->Finish().ok());
  ASSERT_TRUE(second.ReadUntilStep(1));
  ASSERT_TRUE(third.ReadUntil(
      [](const v1::GenerateEvent& event) { return event.progress().queue_position() == 1; }));
  harness.Touch("go2");
  EXPECT_TRUE(second.Finish().ok());
  EXPECT_TRUE(third.Finish().ok());
  EXPECT_GE(FromProto(third.last_job().start_time()),
            FromProto(second.last_job().end_time()) - absl::Seconds(1));
  EXPECT_GT(FromProto(third.last_job().start_time()), FromProto(second.last_job().start_time()));
}

TEST(FrontendTest, AFullQueueAnswersAtOnceWithRetryInfo) {
  FrontendHarness harness;
  harness.options().scheduler.max_waiting = 1;
  harness.Start();
  const auto running = harness.RunUntilStep(1, "go");
  TestCall waiting(harness.channel(), FrontendHarness::Request("x"));
  ASSERT_TRUE(waiting.ReadUntilState(v1::JOB_STATE_QUEUED));
  const grpc::Status status = TestCall(harness.channel(), FrontendHarness::Request("x")).Finish();
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_GE(Detail<google::rpc::RetryInfo>(status).retry_delay().seconds(), 1);
  harness.Touch("go");
  EXPECT_TRUE(running->Finish().ok());
  EXPECT_TRUE(waiting.Finish().ok());
}

TEST(FrontendTest, ACancelledRunStopsAtTheNextStepAndTheSameWorkerServesTheNextJob) {
  FrontendHarness harness;
  harness.Start();
  ASSERT_TRUE(harness.WaitServing(true));
  const std::vector<int> workers = FrontendHarness::WorkerPids();
  {
    TestCall call(harness.channel(),
                  FrontendHarness::Request("hold_step=2:" + harness.Path("never")));
    ASSERT_TRUE(call.ReadUntilStep(2));
    call.Cancel();
    EXPECT_EQ(call.Finish().error_code(), StatusCode::CANCELLED);
  }
  EXPECT_TRUE(TestCall(harness.channel(), FrontendHarness::Request("x")).Finish().ok());
  EXPECT_EQ(FrontendHarness::WorkerPids(), workers);
}

TEST(FrontendTest, ACancelledWaitingJobNeverRuns) {
  FrontendHarness harness;
  harness.options().scheduler.max_waiting = 1;
  harness.Start();
  const auto running = harness.RunUntilStep(1, "go");
  TestCall waiting(harness.channel(), FrontendHarness::Request("exit=1", "poison"));
  ASSERT_TRUE(waiting.ReadUntilState(v1::JOB_STATE_QUEUED));
  waiting.Cancel();
  EXPECT_EQ(waiting.Finish().error_code(), StatusCode::CANCELLED);
  // Its place is free once the scheduler has heard of it.
  std::unique_ptr<TestCall> next;
  for (const absl::Time end = absl::Now() + kTestTimeout; absl::Now() < end;) {
    next = std::make_unique<TestCall>(harness.channel(), FrontendHarness::Request("x"));
    if (next->ReadUntilState(v1::JOB_STATE_QUEUED)) break;
  }
  harness.Touch("go");
  EXPECT_TRUE(running->Finish().ok());
  EXPECT_TRUE(next->Finish().ok());
}

TEST(FrontendTest, ADeadlineThatPassesInTheQueueEndsTheJob) {
  FrontendHarness harness;
  harness.Start();
  const auto running = harness.RunUntilStep(1, "go");
  TestCall waiting(harness.channel(), FrontendHarness::Request("exit=1"), absl::Milliseconds(200));
  EXPECT_EQ(waiting.Finish().error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(waiting.last_job().state(), v1::JOB_STATE_QUEUED);
  harness.Touch("go");
  // Had the expired job run, it would have killed the worker under the next one.
  EXPECT_TRUE(running->Finish().ok());
  EXPECT_TRUE(TestCall(harness.channel(), FrontendHarness::Request("x")).Finish().ok());
}

TEST(FrontendTest, AKilledWorkerFailsItsRequestWithTheReasonAndIsRestarted) {
  FrontendHarness harness;
  harness.Start();
  const auto running = harness.RunUntilStep(1, "never");
  TestCall waiting(harness.channel(), FrontendHarness::Request("x"));
  ASSERT_TRUE(waiting.ReadUntilState(v1::JOB_STATE_QUEUED));
  const std::vector<int> workers = FrontendHarness::WorkerPids();
  ASSERT_THAT(workers, SizeIs(1));
  ASSERT_EQ(kill(workers[0], SIGKILL), 0);
  const grpc::Status status = running->Finish();
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  const auto info = Detail<google::rpc::ErrorInfo>(status);
  EXPECT_EQ(info.reason(), "RANK_LOST");
  EXPECT_EQ(info.domain(), "dlo");
  EXPECT_EQ(info.metadata().at("rank"), "0");
  EXPECT_EQ(info.metadata().at("signal"), "9");
  // The one that waited is kept and runs on the new worker.
  EXPECT_TRUE(waiting.Finish().ok());
  EXPECT_NE(FrontendHarness::WorkerPids(), workers);
}

TEST(FrontendTest, AWorkerThatExitsTellsItsCode) {
  FrontendHarness harness;
  harness.Start();
  const grpc::Status status =
      TestCall(harness.channel(), FrontendHarness::Request("exit=7")).Finish();
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(Detail<google::rpc::ErrorInfo>(status).metadata().at("exit_code"), "7");
  EXPECT_THAT(status.error_message(), HasSubstr("exited with code 7"));
}

TEST(FrontendTest, AStoppedWorkerIsKilledWhenItsHeartbeatsAreMissed) {
  FrontendHarness harness;
  harness.options().supervisor.heartbeat_timeout = absl::Milliseconds(500);
  harness.Start();
  const grpc::Status status =
      TestCall(harness.channel(), FrontendHarness::Request("signal=19")).Finish();
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(Detail<google::rpc::ErrorInfo>(status).reason(), "RANK_LOST");
  EXPECT_THAT(status.error_message(), HasSubstr("was not heard of for 500ms"));
  EXPECT_TRUE(TestCall(harness.channel(), FrontendHarness::Request("x")).Finish().ok());
}

TEST(FrontendTest, AFailedRequestIsToldWithItsReasonAndTheWorkerLives) {
  FrontendHarness harness;
  harness.Start();
  ASSERT_TRUE(harness.WaitServing(true));
  const std::vector<int> workers = FrontendHarness::WorkerPids();
  const struct {
    const char* prompt;
    StatusCode code;
    const char* reason;
  } kCases[] = {{"oom", StatusCode::RESOURCE_EXHAUSTED, "OUT_OF_MEMORY"},
                {"throw", StatusCode::RESOURCE_EXHAUSTED, "OUT_OF_MEMORY"},
                {"fail", StatusCode::INTERNAL, "GENERATION_FAILED"},
                {"nan", StatusCode::INTERNAL, "ENCODING_FAILED"}};
  for (const auto& c : kCases) {
    const grpc::Status status =
        TestCall(harness.channel(), FrontendHarness::Request(c.prompt)).Finish();
    EXPECT_EQ(status.error_code(), c.code) << c.prompt;
    EXPECT_EQ(Detail<google::rpc::ErrorInfo>(status).reason(), c.reason) << c.prompt;
  }
  EXPECT_TRUE(TestCall(harness.channel(), FrontendHarness::Request("x")).Finish().ok());
  EXPECT_EQ(FrontendHarness::WorkerPids(), workers);
}

TEST(FrontendTest, HealthFollowsTheWorker) {
  FrontendHarness harness;
  harness.options().supervisor.worker_arguments = {"--load-hold=" + harness.Path("loaded")};
  harness.Start();
  EXPECT_EQ(harness.Health(), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(harness.Health("dlo.v1.VideoGeneration"), HealthCheckResponse::NOT_SERVING);
  TestCall early(harness.channel(), FrontendHarness::Request("x"));
  ASSERT_TRUE(early.ReadUntilState(v1::JOB_STATE_QUEUED));
  harness.Touch("loaded");
  ASSERT_TRUE(harness.WaitServing(true));
  EXPECT_EQ(harness.Health(), HealthCheckResponse::SERVING);
  EXPECT_EQ(harness.Health("dlo.v1.VideoGeneration"), HealthCheckResponse::SERVING);
  EXPECT_TRUE(early.Finish().ok());

  std::filesystem::remove(harness.Path("loaded"));
  kill(FrontendHarness::WorkerPids().at(0), SIGKILL);
  ASSERT_TRUE(harness.WaitServing(false));
  EXPECT_EQ(harness.Health(), HealthCheckResponse::NOT_SERVING);
  harness.Touch("loaded");
  ASSERT_TRUE(harness.WaitServing(true));
  EXPECT_EQ(harness.Health(), HealthCheckResponse::SERVING);
}

TEST(FrontendTest, AClientThatDoesNotReadHoldsUpNobodyAndGetsEveryByteWhenItDoes) {
  FrontendHarness harness;
  harness.options().links.result_limits = {.messages = 64, .bytes = int64_t{2} << 20};
  harness.Start();
  TestCall stuck(harness.channel(), BigRequest());
  ASSERT_TRUE(stuck.ReadUntilState(v1::JOB_STATE_DECODING));
  EXPECT_TRUE(TestCall(harness.channel(), FrontendHarness::Request("x")).Finish().ok());
  // The other's last message is taken when its end has been told.
  for (const absl::Time end = absl::Now() + absl::Seconds(10);
       harness.frontend().result_bytes_waiting(0) > 0 && absl::Now() < end;) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(harness.frontend().result_bytes_waiting(0), 0);
  const grpc::Status status = stuck.Finish();
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_GT(stuck.video().size(), 25'000'000u);
  EXPECT_EQ(stuck.last_job().result().sha256(), Sha256Of(stuck.video()));
}

TEST(FrontendTest, AModelThatCannotBeLoadedEndsTheServerWithTheReason) {
  FrontendHarness harness({"--load-error=no weights in /nowhere"});
  harness.Start();
  const absl::Status failure = harness.WaitFailure();
  EXPECT_TRUE(absl::IsNotFound(failure)) << failure;
  EXPECT_THAT(failure.message(), HasSubstr("no weights in /nowhere"));
  // Another start would meet the same.
  EXPECT_THAT(failure.message(), Not(HasSubstr("in a row")));
}

TEST(FrontendTest, AWorkerThatDiesWhileLoadingIsTriedAFewTimes) {
  FrontendHarness harness({"--load-signal=9"});
  harness.Start();
  const absl::Status failure = harness.WaitFailure();
  EXPECT_TRUE(absl::IsUnavailable(failure)) << failure;
  EXPECT_THAT(failure.message(), HasSubstr("killed by signal 9"));
  EXPECT_THAT(failure.message(), HasSubstr("start 3; giving up after 3 in a row"));
}

TEST(FrontendTest, AMissingWorkerBinaryIsNamed) {
  FrontendHarness harness;
  harness.options().supervisor.worker_binary = "/nowhere/dlo-worker";
  harness.Start();
  const absl::Status failure = harness.WaitFailure();
  EXPECT_THAT(failure.message(), HasSubstr("/nowhere/dlo-worker"));
}

TEST(FrontendTest, AWorkerOfAnotherBuildIsRefused) {
  FrontendHarness harness({"--build-id=0.0.1+old"});
  harness.Start();
  const absl::Status failure = harness.WaitFailure();
  EXPECT_TRUE(absl::IsFailedPrecondition(failure)) << failure;
  EXPECT_THAT(failure.message(), HasSubstr("dlo-worker is build 0.0.1+old, dlo-serve is build"));
}

TEST(FrontendTest, AnAddressInUseIsRefused) {
  FrontendHarness first;
  first.options().listen = "127.0.0.1:0";
  first.Start();
  FrontendOptions options = first.options();
  options.listen = first.frontend().address();
  options.store.folder = first.Path("other");
  const auto second = Frontend::Start(options, NewTestCard());
  EXPECT_TRUE(absl::IsUnavailable(second.status())) << second.status();
  EXPECT_EQ(second.status().message(),
            absl::StrCat("cannot listen on ", options.listen, ": Address already in use"));
}

TEST(FrontendTest, AClientMayAskNowAndThenWhetherTheServerLivesButNotMoreOften) {
  FrontendHarness patient, strict;
  patient.options().client_ping_interval_min = absl::Milliseconds(5);
  for (FrontendHarness* harness : {&patient, &strict}) harness->Start();
  std::vector<std::unique_ptr<TestCall>> calls;
  for (FrontendHarness* harness : {&patient, &strict}) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    calls.push_back(std::make_unique<TestCall>(
        grpc::CreateCustomChannel(harness->frontend().address(), grpc::InsecureChannelCredentials(),
                                  arguments),
        FrontendHarness::Request("hold_step=2:" + harness->Path("go"))));
    ASSERT_TRUE(calls.back()->ReadUntilStep(2));
  }
  EXPECT_EQ(calls[1]->Finish().error_code(), StatusCode::UNAVAILABLE);
  // By then the other one has bothered its server as often.
  patient.Touch("go");
  EXPECT_TRUE(calls[0]->Finish().ok());
  // Each harness expects to leave no process of this one behind.
  for (FrontendHarness* harness : {&patient, &strict}) harness->Stop();
}

TEST(FrontendTest, AConnectionThatAnswersNothingIsClosed) {
  FrontendHarness harness;
  harness.options().client_silence_max = absl::Milliseconds(100);
  harness.Start();
  sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = {}};
  const std::string path = harness.Path("public.sock");
  ASSERT_LT(path.size(), sizeof(address.sun_path));
  path.copy(address.sun_path, path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  const timeval timeout = {.tv_sec = 20};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  // HTTP/2's preface and an empty SETTINGS frame.
  const std::string hello("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33);
  ASSERT_EQ(send(fd, hello.data(), hello.size(), 0), static_cast<ssize_t>(hello.size()));
  char bytes[4096];
  ssize_t got = 0;
  while ((got = recv(fd, bytes, sizeof(bytes), 0)) > 0) {
  }
  EXPECT_TRUE(got == 0 || errno == ECONNRESET) << strerror(errno);
  close(fd);
}

TEST(FrontendTest, ShutdownFinishesWhatRunsAndEndsTheCallsThatWait) {
  FrontendHarness harness;
  harness.Start();
  const auto running = harness.RunUntilStep(1, "go");
  TestCall waiting(harness.channel(), FrontendHarness::Request("x"));
  ASSERT_TRUE(waiting.ReadUntilState(v1::JOB_STATE_QUEUED));
  const std::shared_ptr<grpc::Channel> channel = harness.channel();
  ASSERT_TRUE(channel->WaitForConnected(absl::ToChronoTime(absl::Now() + kTestTimeout)));

  std::thread shutdown([&] { harness.frontend().Shutdown(absl::Seconds(20)); });
  const grpc::Status waited = waiting.Finish();
  EXPECT_EQ(waited.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(Detail<google::rpc::ErrorInfo>(waited).reason(), "SHUTTING_DOWN");
  const grpc::Status refused = TestCall(channel, FrontendHarness::Request("x")).Finish();
  EXPECT_EQ(refused.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(Detail<google::rpc::ErrorInfo>(refused).reason(), "SHUTTING_DOWN");
  EXPECT_EQ(harness.Health(), HealthCheckResponse::NOT_SERVING);
  harness.Touch("go");
  EXPECT_TRUE(running->Finish().ok());
  EXPECT_EQ(running->last_job().result().sha256(), Sha256Of(running->video()));
  shutdown.join();
  EXPECT_THAT(FrontendHarness::WorkerPids(), SizeIs(0));
}

TEST(FrontendTest, ShutdownEndsWhatOutlastsItsGrace) {
  FrontendHarness harness;
  harness.Start();
  const auto running = harness.RunUntilStep(1, "never");
  std::thread shutdown([&] { harness.frontend().Shutdown(absl::Milliseconds(100)); });
  const grpc::Status status = running->Finish();
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(Detail<google::rpc::ErrorInfo>(status).reason(), "SHUTTING_DOWN");
  shutdown.join();
  EXPECT_THAT(FrontendHarness::WorkerPids(), SizeIs(0));
}

}  // namespace
}  // namespace dlo
