// The whole command line against a VideoGeneration service in this process.
#include "client/client.h"

#include <fcntl.h>
#include <grpcpp/ext/health_check_service_server_builder_option.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/sha256.h"
#include "client/test_folder.h"
#include "client/test_run.h"
#include "dlo/v1/video_generation.grpc.pb.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "media/contact_sheet.h"
#include "media/video_writer.h"
#include "proto/build_id.h"

extern char** environ;

namespace dlo {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

constexpr absl::Duration kDeadline = absl::Seconds(20);

using Writer = grpc::ServerWriter<v1::GenerateEvent>;
using Handler =
    std::function<grpc::Status(grpc::ServerContext*, const v1::GenerateRequest&, Writer*)>;

class FakeService : public v1::VideoGeneration::Service {
 public:
  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                        Writer* writer) override {
    return handler(context, *request, writer);
  }
  grpc::Status DownloadResult(grpc::ServerContext*, const v1::DownloadResultRequest* request,
                              grpc::ServerWriter<v1::ResultChunk>* writer) override {
    if (!request->timeline() || request->id() != "traced") {
      return grpc::Status(grpc::StatusCode::NOT_FOUND, "no timeline");
    }
    v1::ResultChunk chunk;
    chunk.set_data("{}");
    writer->Write(chunk);
    return grpc::Status::OK;
  }
  grpc::Status GetStatus(grpc::ServerContext*, const v1::GetStatusRequest*,
                         v1::ServerStatus* response) override {
    if (status.ranks().empty()) return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "");
    *response = status;
    return grpc::Status::OK;
  }
  Handler handler;
  v1::ServerStatus status;  // without ranks: that of a server without GetStatus
};

void SendJob(Writer* writer, v1::JobState state) {
  v1::GenerateEvent event;
  v1::Job* job = event.mutable_job();
  job->set_state(state);
  if (state == v1::JOB_STATE_QUEUED) job->mutable_progress()->set_queue_position(2);
  v1::VideoSettings* settings = job->mutable_settings();
  settings->set_width(32);
  settings->set_height(32);
  settings->set_num_frames(5);
  settings->set_fps(16);
  settings->set_num_inference_steps(4);
  settings->set_guidance_scale(5);
  settings->set_flow_shift(3);
  settings->set_solver("unipc");
  settings->set_seed(7);
  writer->Write(event);
}

void SendStep(Writer* writer, int step) {
  v1::GenerateEvent event;
  v1::Progress* progress = event.mutable_progress();
  progress->set_step(step);
  progress->set_num_steps(4);
  progress->mutable_step_time()->set_nanos(500'000'000);
  progress->mutable_remaining()->set_seconds(4 - step);
  writer->Write(event);
}

void SendBytes(Writer* writer, const std::string& bytes, int64_t chunk_bytes) {
  for (int64_t offset = 0; offset < static_cast<int64_t>(bytes.size()); offset += chunk_bytes) {
    v1::GenerateEvent event;
    event.mutable_chunk()->set_offset(offset);
    event.mutable_chunk()->set_data(bytes.substr(offset, chunk_bytes));
    writer->Write(event);
  }
}

void SendResult(Writer* writer, int64_t size_bytes, const std::string& sha256) {
  v1::GenerateEvent event;
  event.mutable_job()->set_state(v1::JOB_STATE_SUCCEEDED);
  v1::Result* result = event.mutable_job()->mutable_result();
  result->set_size_bytes(size_bytes);
  result->set_sha256(sha256);
  result->mutable_times()->mutable_denoise()->set_seconds(2);
  writer->Write(event);
}

// A request that goes well and results in `bytes`.
Handler Succeeds(const std::string& bytes) {
  return [bytes](grpc::ServerContext*, const v1::GenerateRequest&, Writer* writer) {
    SendJob(writer, v1::JOB_STATE_QUEUED);
    SendJob(writer, v1::JOB_STATE_ENCODING_TEXT);
    SendJob(writer, v1::JOB_STATE_DENOISING);
    for (int step = 1; step <= 4; ++step) SendStep(writer, step);
    SendJob(writer, v1::JOB_STATE_DECODING);
    SendBytes(writer, bytes, 1000);
    SendResult(writer, bytes.size(), Sha256Of(bytes));
    return grpc::Status::OK;
  };
}

Handler Fails(grpc::StatusCode code, const std::string& message,
              const std::vector<const google::protobuf::Message*>& details = {}) {
  google::rpc::Status status;
  status.set_code(code);
  for (const google::protobuf::Message* detail : details) status.add_details()->PackFrom(*detail);
  const std::string bytes = details.empty() ? "" : status.SerializeAsString();
  return [code, message, bytes](grpc::ServerContext*, const v1::GenerateRequest&, Writer*) {
    return grpc::Status(code, message, bytes);
  };
}

class ClientTest : public ::testing::Test {
 protected:
  ~ClientTest() override {
    if (server_) server_->Shutdown(absl::ToChronoTime(absl::Now()));
  }

  void Serve(Handler handler) {
    service_.handler = std::move(handler);
    Serve();
  }
  void Serve() {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    builder.AddListeningPort(endpoint_, grpc::InsecureServerCredentials());
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
  }

  Ran Run(const std::vector<std::string>& args) { return RunClientWith(args, input_, interrupt_); }

  Ran RunGenerate(const std::vector<std::string>& more = {}) {
    std::vector<std::string> args = {"generate", "--endpoint", endpoint_, "--prompt",
                                     "a ball",   "--output",   output()};
    args.insert(args.end(), more.begin(), more.end());
    return Run(args);
  }

  // Sends a first event, then answers nothing until the client is gone.
  Handler Hangs() {
    return [this](grpc::ServerContext* context, const v1::GenerateRequest&, Writer* writer) {
      SendJob(writer, v1::JOB_STATE_DENOISING);
      SendBytes(writer, "vi", 2);
      started_.Notify();
      const absl::Time deadline = absl::Now() + kDeadline;
      while (!context->IsCancelled() && absl::Now() < deadline) {
        absl::SleepFor(absl::Milliseconds(2));
      }
      if (context->IsCancelled()) cancelled_.Notify();
      return grpc::Status::CANCELLED;
    };
  }

  std::string output() const { return files_ / "a.mp4"; }

  // Fails with one line on err, that line being `matcher`, and leaves no file.
  void ExpectFailure(const Ran& ran, int code, const ::testing::Matcher<std::string>& matcher) {
    EXPECT_EQ(ran.code, code);
    EXPECT_EQ(ran.out, "");
    EXPECT_THAT(ran.err, AllOf(StartsWith("dlo-client: "), matcher));
    EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
    EXPECT_THAT(files_.names(), IsEmpty());
  }

  TestFolder files_;
  TestFolder sockets_;
  const std::string endpoint_ = "unix:" + (sockets_ / "s").string();
  std::string input_;
  Interrupt interrupt_;
  absl::Notification started_;    // a hanging request
  absl::Notification cancelled_;  // seen so by the service
  FakeService service_;
  std::unique_ptr<grpc::Server> server_;
};

TEST_F(ClientTest, WritesTheFileAndShowsProgress) {
  const std::string bytes(2500, 'x');
  Serve(Succeeds(bytes));
  const Ran ran = RunGenerate();
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.out, output() + "\n");
  EXPECT_EQ(TestFolder::Read(output()), bytes);
  EXPECT_THAT(files_.names(), ElementsAre("a.mp4"));
  EXPECT_EQ(ran.err,
            "32 x 32, 5 frames at 16 fps, 4 steps, guidance 5, shift 3, unipc, seed 7\n"
            "queued, position 2\n"
            "encoding text\n"
            "denoising 0/4\n"
            "denoising 1/4, 3.00 s left, 0.50 s/step\n"
            "denoising 2/4, 2.00 s left, 0.50 s/step\n"
            "denoising 3/4, 1.00 s left, 0.50 s/step\n"
            "denoising 4/4, 0.50 s/step\n"
            "decoding\n"
            "receiving 1 kB\n"
            "receiving 2 kB\n"
            "done in 2.00 s (queue 0.00 s, text 0.00 s, denoise 2.00 s, decode 0.00 s, encode 0.00 "
            "s), 2 kB\n");
}

TEST_F(ClientTest, ATimelineIsAskedForAndFetchedAfterTheVideo) {
  bool trace = false;
  Serve([&trace](grpc::ServerContext* context, const v1::GenerateRequest& request, Writer* writer) {
    trace = request.trace();
    SendBytes(writer, "video", 5);
    v1::GenerateEvent event;
    event.mutable_job()->set_id("traced");
    event.mutable_job()->set_state(v1::JOB_STATE_SUCCEEDED);
    event.mutable_job()->mutable_result()->set_size_bytes(5);
    event.mutable_job()->mutable_result()->set_sha256(Sha256Of("video"));
    writer->Write(event);
    return grpc::Status::OK;
  });
  const std::string timeline = files_ / "a.json";
  const Ran ran = RunGenerate({"--trace", timeline});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_TRUE(trace);
  EXPECT_EQ(ran.out, output() + "\n" + timeline + "\n");
  EXPECT_THAT(files_.names(), ::testing::UnorderedElementsAre("a.mp4", "a.json"));
  EXPECT_EQ(RunGenerate().code, 0);
  EXPECT_FALSE(trace);
}

TEST_F(ClientTest, SaysWhatWasStreamedAndWaitedFor) {
  Serve([](grpc::ServerContext*, const v1::GenerateRequest&, Writer* writer) {
    SendBytes(writer, "video", 5);
    v1::GenerateEvent event;
    event.mutable_job()->set_state(v1::JOB_STATE_SUCCEEDED);
    v1::Result* result = event.mutable_job()->mutable_result();
    result->set_size_bytes(5);
    result->set_sha256(Sha256Of("video"));
    for (int rank = 0; rank < 2; ++rank) {
      v1::StageStreaming* stage = result->add_ranks()->add_streaming();
      stage->set_bus_bytes(2'000'000'000);
      stage->set_fabric_bytes(6'000'000'000);
      stage->mutable_copy_stall()->set_nanos(150'000'000);
      stage->mutable_gather_stall()->set_nanos(50'000'000);
      stage->set_hidden_ratio(rank == 0 ? 0.999 : 0.75);
    }
    writer->Write(event);
    return grpc::Status::OK;
  });
  const Ran ran = RunGenerate();
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("streamed 4.00 GB over the bus, 12.00 GB between ranks; computing "
                                 "waited 0.40 s (copy 0.30 s, gather 0.10 s), 75 % hidden\n"));
}

TEST_F(ClientTest, QuietPrintsNothing) {
  Serve(Succeeds("video"));
  const Ran ran = RunGenerate({"--quiet"});
  EXPECT_EQ(ran.code, 0);
  EXPECT_EQ(ran.out + ran.err, "");
  EXPECT_EQ(TestFolder::Read(output()), "video");
}

TEST_F(ClientTest, EveryFlagReachesItsField) {
  v1::GenerateRequest seen;
  Serve([&](grpc::ServerContext*, const v1::GenerateRequest& request, Writer* writer) {
    seen = request;
    SendResult(writer, 0, Sha256Of(""));
    return grpc::Status::OK;
  });
  const Ran ran = Run({"generate",
                       "--endpoint",
                       endpoint_,
                       "--prompt",
                       "a ball",
                       "--negative-prompt",
                       "blur",
                       "--steps",
                       "9",
                       "--width",
                       "48",
                       "--height",
                       "64",
                       "--frames",
                       "13",
                       "--fps",
                       "12.5",
                       "--guidance-scale",
                       "4.5",
                       "--guidance-scale-2",
                       "3",
                       "--flow-shift",
                       "8",
                       "--solver",
                       "euler",
                       "--seed",
                       "18446744073709551615",
                       "-o",
                       files_ / "a.safetensors"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(seen.prompt(), "a ball");
  EXPECT_EQ(seen.negative_prompt(), "blur");
  EXPECT_EQ(seen.output_format(), v1::OUTPUT_FORMAT_SAFETENSORS);
  const v1::VideoSettings& s = seen.settings();
  EXPECT_EQ(s.num_inference_steps(), 9);
  EXPECT_EQ(s.width(), 48);
  EXPECT_EQ(s.height(), 64);
  EXPECT_EQ(s.num_frames(), 13);
  EXPECT_EQ(s.fps(), 12.5);
  EXPECT_EQ(s.guidance_scale(), 4.5);
  EXPECT_EQ(s.guidance_scale_2(), 3);
  EXPECT_EQ(s.flow_shift(), 8);
  EXPECT_EQ(s.solver(), "euler");
  EXPECT_EQ(s.seed(), 18446744073709551615u);
}

TEST_F(ClientTest, WhatIsNotAskedForIsLeftToTheServer) {
  v1::GenerateRequest seen;
  Serve([&](grpc::ServerContext*, const v1::GenerateRequest& request, Writer* writer) {
    seen = request;
    SendResult(writer, 0, Sha256Of(""));
    return grpc::Status::OK;
  });
  ASSERT_EQ(RunGenerate().code, 0);
  EXPECT_EQ(seen.settings().ByteSizeLong(), 0);
  EXPECT_EQ(seen.output_format(), v1::OUTPUT_FORMAT_MP4);
}

TEST_F(ClientTest, DashReadsThePromptFromStandardInput) {
  std::string seen;
  Serve([&](grpc::ServerContext*, const v1::GenerateRequest& request, Writer* writer) {
    seen = request.prompt();
    SendResult(writer, 0, Sha256Of(""));
    return grpc::Status::OK;
  });
  input_ = "a ball\nand a cube\n";
  EXPECT_EQ(Run({"generate", "--endpoint", endpoint_, "--prompt", "-", "-o", output()}).code, 0);
  EXPECT_EQ(seen, "a ball\nand a cube");
}

TEST_F(ClientTest, ContactSheetOfTheVideoReceived) {
  auto writer = VideoWriter::Create({.width = 32, .height = 32, .num_frames = 5});
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE((*writer)->Append(std::vector<float>(size_t{5} * 3 * 32 * 32, 0.5f)).ok());
  absl::StatusOr<EncodedVideo> video = (*writer)->Finish();
  ASSERT_TRUE(video.ok()) << video.status();
  Serve(Succeeds(video->bytes));
  const Ran ran = RunGenerate({"--contact-sheet", files_ / "sheet.png"});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.out, absl::StrCat(output(), "\n", (files_ / "sheet.png").string(), "\n"));
  EXPECT_THAT(files_.names(), ElementsAre("a.mp4", "sheet.png"));
  // Width and height stand big-endian at bytes 16 and 20 of a PNG.
  const std::string png = TestFolder::Read(files_ / "sheet.png");
  ASSERT_GT(png.size(), 24);
  const ContactSheetLayout sheet = LayOutContactSheet(5, 32, 32);
  EXPECT_EQ(png.substr(1, 3), "PNG");
  EXPECT_EQ(static_cast<unsigned char>(png[19]), sheet.width());
  EXPECT_EQ(static_cast<unsigned char>(png[23]), sheet.height());
}

TEST_F(ClientTest, AVideoThatCannotBeDecodedIsKeptWithoutASheet) {
  Serve(Succeeds("no video"));
  const Ran ran = RunGenerate({"--quiet", "--contact-sheet", files_ / "sheet.png"});
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.err, HasSubstr("a.mp4 is complete, but its contact sheet cannot be made"));
  EXPECT_THAT(files_.names(), ElementsAre("a.mp4"));
}

TEST_F(ClientTest, WrongCommandLinesAreOneLineAndExit2) {
  struct Case {
    std::vector<std::string> args;
    const char* message;
  };
  for (const Case& c : {
           Case{{}, "subcommand"},
           Case{{"generate", "--prompt", "x"}, "--output"},
           Case{{"generate", "--output", "a.mp4"}, "--prompt"},
           Case{{"generate", "--prompt", "x", "--output", "a.mp4", "--steps", "many"}, "--steps"},
           Case{{"generate", "--prompt", "x", "--output", "a.mp4", "--seed", "-1"}, "--seed"},
           Case{{"generate", "--prompt", "x", "--output", "a.mp4", "--timeout", "5"}, "unit"},
           Case{{"generate", "--prompt", "x", "--output", "a.mp4", "--timeout", "-5s"},
                "--timeout"},
           Case{{"generate", "--prompt", "x", "--output", "a.mp4", "--fast"}, "--fast"},
           Case{{"status", "--wait", "soon"}, "--wait"},
       }) {
    const Ran ran = Run(c.args);
    ExpectFailure(ran, 2, HasSubstr(c.message));
  }
}

TEST_F(ClientTest, BadOutputsAreToldBeforeAnyRequest) {
  std::atomic<int> num_requests = 0;
  Serve([&](grpc::ServerContext*, const v1::GenerateRequest&, Writer*) {
    ++num_requests;
    return grpc::Status::OK;
  });
  auto run = [&](const std::string& output, const std::vector<std::string>& more) {
    std::vector<std::string> args = {"generate", "--endpoint", endpoint_, "--prompt",
                                     "x",        "-o",         output};
    args.insert(args.end(), more.begin(), more.end());
    return Run(args);
  };
  ExpectFailure(run(files_ / "a.gif", {}), 1, HasSubstr(".mp4 (video)"));
  ExpectFailure(run(files_ / "no/a.mp4", {}), 1, HasSubstr("no/a.mp4"));
  ExpectFailure(run(output(), {"--contact-sheet", files_ / "a.jpg"}), 1, HasSubstr(".png"));
  ExpectFailure(run(output(), {"--contact-sheet", files_ / "no/a.png"}), 1, HasSubstr("no/a.png"));
  ExpectFailure(run(files_ / "a.png", {"--contact-sheet", files_ / "b.png"}), 1, HasSubstr(".mp4"));
  EXPECT_EQ(num_requests, 0);
}

TEST_F(ClientTest, EachFieldViolationUnderItsFlag) {
  google::rpc::BadRequest request;
  auto add = [&](const char* field, const char* description) {
    auto* violation = request.add_field_violations();
    violation->set_field(field);
    violation->set_description(description);
  };
  add("settings.width", "must be a multiple of 16,\n got 100");
  add("settings.num_inference_steps", "must be at least 1");
  add("extra.fancy", "is not known");
  Serve(Fails(grpc::StatusCode::INVALID_ARGUMENT, "three wrong fields", {&request}));
  ExpectFailure(RunGenerate(), 1,
                HasSubstr("invalid request: --width: must be a multiple of 16, got 100; --steps: "
                          "must be at least 1; extra.fancy: is not known\n"));
}

TEST_F(ClientTest, AFullQueueSaysWhenToComeBack) {
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(42);
  Serve(Fails(grpc::StatusCode::RESOURCE_EXHAUSTED, "64 requests wait", {&retry}));
  ExpectFailure(RunGenerate(), 1, HasSubstr("the server is busy: 64 requests wait; retry in 42 s"));
}

TEST_F(ClientTest, ALostWorkerIsNotTakenForAMissingServer) {
  google::rpc::ErrorInfo info;
  info.set_reason("RANK_LOST");
  (*info.mutable_metadata())["rank"] = "0";
  Serve(Fails(grpc::StatusCode::UNAVAILABLE, "rank 0 was killed by signal 9", {&info}));
  ExpectFailure(
      RunGenerate(), 1,
      AllOf(HasSubstr("killed by signal 9 (RANK_LOST, rank 0)"), Not(HasSubstr("start one"))));
}

TEST_F(ClientTest, NoServerSaysHowToStartOne) {
  ExpectFailure(RunGenerate(), 1,
                AllOf(HasSubstr(endpoint_), HasSubstr("`dlo-serve`"),
                      HasSubstr("No such file or directory")));
}

TEST_F(ClientTest, DetailsThatAreNoDetailsAreIgnored) {
  Serve([](grpc::ServerContext*, const v1::GenerateRequest&, Writer*) {
    return grpc::Status(grpc::StatusCode::INTERNAL, "broken\x1b[2J\n", "\xff\xff no protobuf");
  });
  ExpectFailure(RunGenerate(), 1, HasSubstr("broken [2J\n"));
}

TEST_F(ClientTest, BytesThatDoNotMatchTheirHashAreNoVideo) {
  Serve([](grpc::ServerContext*, const v1::GenerateRequest&, Writer* writer) {
    SendBytes(writer, "video", 5);
    SendResult(writer, 5, Sha256Of("other"));
    return grpc::Status::OK;
  });
  ExpectFailure(RunGenerate({"--quiet"}), 1, HasSubstr("SHA-256"));
}

TEST_F(ClientTest, MissingBytesAreNoVideo) {
  Serve([](grpc::ServerContext*, const v1::GenerateRequest&, Writer* writer) {
    SendBytes(writer, "vid", 5);
    SendResult(writer, 5, Sha256Of("vid"));
    return grpc::Status::OK;
  });
  ExpectFailure(RunGenerate({"--quiet"}), 1, HasSubstr("3 of the 5 bytes"));
}

TEST_F(ClientTest, AGapInTheBytesEndsTheRequest) {
  Serve([&](grpc::ServerContext* context, const v1::GenerateRequest&, Writer* writer) {
    v1::GenerateEvent event;
    event.mutable_chunk()->set_offset(3);
    event.mutable_chunk()->set_data("eo");
    while (writer->Write(event)) {
    }
    if (context->IsCancelled()) cancelled_.Notify();
    return grpc::Status::CANCELLED;
  });
  ExpectFailure(RunGenerate({"--quiet"}), 1, HasSubstr("from 3 where those from 0 were due"));
  EXPECT_TRUE(cancelled_.WaitForNotificationWithTimeout(kDeadline));
}

TEST_F(ClientTest, AnEndWithoutAResultIsAnError) {
  Serve([](grpc::ServerContext*, const v1::GenerateRequest&, Writer* writer) {
    SendBytes(writer, "video", 5);
    return grpc::Status::OK;
  });
  ExpectFailure(RunGenerate({"--quiet"}), 1, HasSubstr("without a result"));
}

TEST_F(ClientTest, AnInterruptCancelsTheRequest) {
  Serve(Hangs());
  std::thread presser([&] {
    started_.WaitForNotification();
    interrupt_.Trigger(SIGINT);
  });
  const Ran ran = RunGenerate({"--quiet"});
  presser.join();
  ExpectFailure(ran, 130, HasSubstr("interrupted"));
  EXPECT_TRUE(cancelled_.WaitForNotificationWithTimeout(kDeadline));
}

TEST_F(ClientTest, AnInterruptBeforeTheRequestCancelsItToo) {
  Serve(Hangs());
  interrupt_.Trigger(SIGTERM);
  ExpectFailure(RunGenerate({"--quiet"}), 143, HasSubstr("interrupted"));
}

TEST_F(ClientTest, TimeoutEndsTheRequest) {
  Serve(Hangs());
  ExpectFailure(RunGenerate({"--quiet", "--timeout", "200ms"}), 1, HasSubstr("--timeout 200ms"));
}

TEST_F(ClientTest, StatusOfAReadyServer) {
  Serve();
  const Ran ran = Run({"status", "--endpoint", endpoint_});
  EXPECT_EQ(ran.code, 0);
  EXPECT_EQ(ran.out, "SERVING\n");
  EXPECT_EQ(ran.err, "");
}

TEST_F(ClientTest, StatusOfAServerThatIsNotReady) {
  Serve();
  server_->GetHealthCheckService()->SetServingStatus(false);
  const Ran ran = Run({"status", "--endpoint", endpoint_});
  EXPECT_EQ(ran.code, 1);
  EXPECT_EQ(ran.out, "NOT_SERVING\n");
  EXPECT_THAT(ran.err, HasSubstr("not ready"));
  const Ran waited = Run({"status", "--endpoint", endpoint_, "--wait", "500ms"});
  EXPECT_EQ(waited.code, 1);
  EXPECT_EQ(waited.out, "NOT_SERVING\n");
}

TEST_F(ClientTest, StatusTellsWhatEachRankIsDoingAndWhereItsWeightsCameFrom) {
  v1::RankStatus& first = *service_.status.add_ranks();
  first.set_ready(true);
  v1::StartupRecord& startup = *first.mutable_startup();
  startup.set_mode("preferred");
  startup.set_outcome("canonical-fallback");
  startup.mutable_duration()->set_seconds(12);
  startup.set_read_bytes(5'700'000'000);
  v1::StartupAttempt& attempt = *startup.add_attempts();
  attempt.set_stage("lookup");
  attempt.set_result("miss");
  attempt.set_reason("miss");
  attempt.set_retryable(true);
  attempt.set_next("canonical-fallback");
  attempt.set_message("no artifact\n\x1b[2J");
  v1::HostWeights& weights = *startup.add_host_weights();
  weights.set_component("transformer");
  weights.set_backing("memory");
  weights.set_reason("dtype");
  weights.set_message("tensors have another dtype");
  startup.mutable_publication()->set_outcome("failed");
  startup.mutable_publication()->set_reason("active-build");
  service_.status.add_ranks()->set_rank(1);
  Serve();
  const Ran ran = Run({"status", "--endpoint", endpoint_});
  EXPECT_EQ(ran.code, 0);
  EXPECT_EQ(ran.out,
            "SERVING\n"
            "rank 0: ready; weights: canonical-fallback (preferred) in 12.0 s, 5700.0 MB read, 0.0 "
            "MB mapped; publication: failed (active-build)\n"
            "  lookup: miss (miss, retryable), then canonical-fallback: no artifact [2J\n"
            "  transformer: memory (dtype): tensors have another dtype\n"
            "rank 1: not ready\n");
  server_->GetHealthCheckService()->SetServingStatus(false);
  EXPECT_THAT(Run({"status", "--endpoint", endpoint_}).out, StartsWith("NOT_SERVING\nrank 0: "));
}

TEST_F(ClientTest, StatusWithoutAServer) {
  ExpectFailure(Run({"status", "--endpoint", endpoint_}), 1, HasSubstr("no server answers"));
  ExpectFailure(Run({"status", "--endpoint", endpoint_, "--wait", "150ms"}), 1,
                HasSubstr("no server answers"));
}

TEST_F(ClientTest, StatusWaitsForAServerToListenAndToBecomeReady) {
  std::thread starter([&] {
    Serve();
    server_->GetHealthCheckService()->SetServingStatus(false);
    server_->GetHealthCheckService()->SetServingStatus(true);
  });
  const Ran ran = Run({"status", "--endpoint", endpoint_, "--wait", "20s"});
  starter.join();
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.out, "SERVING\n");
}

TEST_F(ClientTest, TheVersionIsOneLine) {
  const Ran ran = Run({"--version"});
  EXPECT_EQ(ran.code, 0);
  EXPECT_EQ(ran.out, absl::StrCat("dlo-client ", BuildId(), "\n"));
}

TEST_F(ClientTest, StatusWaitCanBeInterrupted) {
  interrupt_.Trigger(SIGINT);
  const Ran ran = Run({"status", "--endpoint", endpoint_, "--wait", "20s"});
  EXPECT_EQ(ran.code, 130);
}

// The real process, with real signals.
TEST_F(ClientTest, CtrlCEndsTheProcessWith130AndNoFile) {
  Serve(Hangs());
  const std::string binary = std::string(DLO_BINARY_DIR) + "/bin/dlo-client";
  const std::string path = output(), log = sockets_ / "log";
  const char* argv[] = {binary.c_str(),    "generate",   "--endpoint",
                        endpoint_.c_str(), "--prompt",   "a ball",
                        "--output",        path.c_str(), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, log.c_str(), O_CREAT | O_WRONLY, 0600);
  pid_t pid = 0;
  ASSERT_EQ(posix_spawn(&pid, binary.c_str(), &actions, nullptr, const_cast<char**>(argv), environ),
            0);
  posix_spawn_file_actions_destroy(&actions);
  EXPECT_TRUE(started_.WaitForNotificationWithTimeout(kDeadline));
  EXPECT_EQ(kill(pid, SIGINT), 0);
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 130);
  EXPECT_TRUE(cancelled_.WaitForNotificationWithTimeout(kDeadline));
  EXPECT_THAT(files_.names(), IsEmpty());
  EXPECT_THAT(TestFolder::Read(log), HasSubstr("dlo-client: interrupted"));
}

}  // namespace
}  // namespace dlo
