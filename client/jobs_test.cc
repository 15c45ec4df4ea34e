// The job commands against a VideoGeneration service in this process.
#include "client/jobs.h"

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/sha256.h"
#include "client/client.h"
#include "client/progress_bar.h"
#include "client/test_folder.h"
#include "client/test_run.h"
#include "dlo/v1/video_generation.grpc.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dlo {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kDeadline = absl::Seconds(20);

v1::Job NewJob(const std::string& id, v1::JobState state) {
  v1::Job job;
  job.set_id(id);
  job.set_state(state);
  v1::VideoSettings* settings = job.mutable_settings();
  settings->set_width(32);
  settings->set_height(32);
  settings->set_num_frames(5);
  settings->set_fps(16);
  settings->set_num_inference_steps(4);
  settings->set_guidance_scale(5);
  settings->set_flow_shift(3);
  settings->set_solver("unipc");
  settings->set_seed(7);
  job.mutable_create_time()->set_seconds(1'800'000'000);
  return job;
}

// Keeps jobs in memory; every job runs at once.
class FakeJobs : public v1::VideoGeneration::Service {
 public:
  grpc::Status SubmitJob(grpc::ServerContext*, const v1::GenerateRequest* request,
                         v1::Job* job) override {
    submitted = *request;
    *job =
        NewJob(request->request_id().empty() ? "new" : request->request_id(), v1::JOB_STATE_QUEUED);
    if (request->validate_only()) *job->mutable_forecast() = forecast;
    return grpc::Status::OK;
  }
  grpc::Status GetJob(grpc::ServerContext*, const v1::GetJobRequest* request,
                      v1::Job* job) override {
    return Find(request->id(), job);
  }
  grpc::Status ListJobs(grpc::ServerContext*, const v1::ListJobsRequest* request,
                        v1::ListJobsResponse* response) override {
    list_requests.push_back(*request);
    const int from = request->page_token().empty() ? 0 : std::stoi(request->page_token());
    const int to = std::min(from + std::min(request->page_size(), 2), 5);
    for (int i = from; i < to; ++i) {
      *response->add_jobs() = NewJob(absl::StrCat("job", i), v1::JOB_STATE_DENOISING);
    }
    if (to < 5) response->set_next_page_token(absl::StrCat(to));
    return grpc::Status::OK;
  }
  grpc::Status WatchJob(grpc::ServerContext* context, const v1::WatchJobRequest* request,
                        grpc::ServerWriter<v1::GenerateEvent>* writer) override {
    v1::GenerateEvent event;
    const grpc::Status found = Find(request->id(), event.mutable_job());
    if (!found.ok()) return found;
    const v1::Job last = event.job();
    *event.mutable_job() = NewJob(request->id(), v1::JOB_STATE_DENOISING);
    writer->Write(event);
    event.mutable_progress()->set_step(3);
    event.mutable_progress()->set_num_steps(4);
    writer->Write(event);
    if (last.state() == v1::JOB_STATE_DENOISING) {
      watched.Notify();
      const absl::Time end = absl::Now() + kDeadline;
      while (!context->IsCancelled() && absl::Now() < end) absl::SleepFor(absl::Milliseconds(2));
      return grpc::Status::CANCELLED;
    }
    *event.mutable_job() = last;
    writer->Write(event);
    return grpc::Status::OK;
  }
  grpc::Status DownloadResult(grpc::ServerContext*, const v1::DownloadResultRequest* request,
                              grpc::ServerWriter<v1::ResultChunk>* writer) override {
    v1::Job job;
    const grpc::Status found = Find(request->id(), &job);
    if (!found.ok()) return found;
    v1::ResultChunk chunk;
    if (request->timeline()) {
      chunk.set_data("{}");
      writer->Write(chunk);
      return grpc::Status::OK;
    }
    offsets.push_back(request->offset());
    const int64_t size = video.size();
    for (int64_t offset = request->offset(); offset < size; offset += 10) {
      if (breaks > 0 && offset >= request->offset() + 20) {
        --breaks;
        return grpc::Status(broken, "gone for a moment");
      }
      chunk.set_offset(offset);
      chunk.set_data(video.substr(offset, 10));
      writer->Write(chunk);
    }
    return grpc::Status::OK;
  }
  grpc::Status CancelJob(grpc::ServerContext*, const v1::CancelJobRequest* request,
                         v1::Job* job) override {
    const grpc::Status found = Find(request->id(), job);
    if (found.ok()) job->set_state(v1::JOB_STATE_CANCELLED);
    return found;
  }
  grpc::Status DeleteJob(grpc::ServerContext*, const v1::DeleteJobRequest* request,
                         v1::DeleteJobResponse*) override {
    v1::Job job;
    const grpc::Status found = Find(request->id(), &job);
    jobs.erase(request->id());
    return found;
  }

  std::map<std::string, v1::Job> jobs;
  std::string video;
  int breaks = 0;                                           // downloads that still break off
  grpc::StatusCode broken = grpc::StatusCode::UNAVAILABLE;  // how a call breaks
  v1::Forecast forecast;
  v1::GenerateRequest submitted;
  std::vector<v1::ListJobsRequest> list_requests;
  std::vector<int64_t> offsets;
  absl::Notification watched;

 private:
  grpc::Status Find(const std::string& id, v1::Job* job) {
    const auto it = jobs.find(id);
    if (it == jobs.end()) {
      return grpc::Status(grpc::StatusCode::NOT_FOUND, "there is no job \"" + id + "\"");
    }
    *job = it->second;
    return grpc::Status::OK;
  }
};

class JobCommandsTest : public ::testing::Test {
 protected:
  JobCommandsTest() {
    service_.video = std::string(95, 'v');
    v1::Job done = NewJob("done", v1::JOB_STATE_SUCCEEDED);
    done.mutable_result()->set_size_bytes(95);
    done.mutable_result()->set_sha256(Sha256Of(service_.video));
    done.mutable_result()->set_media_type("video/mp4");
    done.mutable_result()->mutable_times()->mutable_denoise()->set_seconds(2);
    v1::Job failed = NewJob("failed", v1::JOB_STATE_FAILED);
    failed.mutable_failure()->set_code(grpc::StatusCode::RESOURCE_EXHAUSTED);
    failed.mutable_failure()->set_reason("OUT_OF_MEMORY");
    failed.mutable_failure()->set_message("no memory\x1b[2J");
    service_.jobs = {{"done", done},
                     {"failed", failed},
                     {"running", NewJob("running", v1::JOB_STATE_DENOISING)}};
    grpc::ServerBuilder builder;
    builder.AddListeningPort(endpoint_, grpc::InsecureServerCredentials());
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
  }
  ~JobCommandsTest() override { server_->Shutdown(absl::ToChronoTime(absl::Now())); }

  Ran Run(std::vector<std::string> args) {
    args.insert(args.begin() + 1, {"--endpoint", endpoint_});
    return RunClientWith(args, "from standard input\n", interrupt_);
  }

  TestFolder files_;
  TestFolder sockets_;
  const std::string endpoint_ = "unix:" + (sockets_ / "s").string();
  Interrupt interrupt_;
  FakeJobs service_;
  std::unique_ptr<grpc::Server> server_;
};

TEST_F(JobCommandsTest, SubmitSendsTheRequestAndPrintsTheId) {
  Ran ran = Run({"submit", "--prompt", "a ball", "--steps", "9", "--request-id", "mine", "--format",
                 "safetensors"});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.out, "mine\n");
  EXPECT_EQ(service_.submitted.prompt(), "a ball");
  EXPECT_EQ(service_.submitted.request_id(), "mine");
  EXPECT_EQ(service_.submitted.settings().num_inference_steps(), 9);
  EXPECT_EQ(service_.submitted.output_format(), v1::OUTPUT_FORMAT_SAFETENSORS);
  EXPECT_FALSE(service_.submitted.validate_only());

  service_.forecast.set_transfer("none");
  ran = Run({"submit", "--prompt", "-", "--validate-only"});
  EXPECT_EQ(ran.out,
            "32 x 32, 5 frames at 16 fps, 4 steps, guidance 5, shift 3, unipc, seed 7\n"
            "forecast: time not known, as no request has run yet, 0 TFLOP, transfer none\n"
            "plan: \n");
  EXPECT_EQ(service_.submitted.prompt(), "from standard input");
  EXPECT_TRUE(service_.submitted.validate_only());
}

TEST_F(JobCommandsTest, ValidateOnlyPrintsTheForecast) {
  v1::Forecast& forecast = service_.forecast;
  forecast.mutable_run_time()->set_seconds(62);
  forecast.mutable_times()->mutable_text()->set_seconds(1);
  forecast.mutable_times()->mutable_denoise()->set_seconds(58);
  forecast.mutable_times()->mutable_decode()->set_seconds(3);
  forecast.set_transfer("rank-local");
  forecast.set_bus_bytes(3'000'000);
  forecast.set_text_flops(1e9);
  forecast.set_denoise_flops(3.5e12);
  for (const auto& [component, passes] : {std::pair{"text_encoder", 2}, {"transformer", 4}}) {
    v1::PlanRun* run = forecast.add_plan();
    run->set_component(component);
    run->set_num_blocks(30);
    run->set_passes(passes);
  }
  const Ran ran = Run({"submit", "--prompt", "x", "--validate-only"});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr(absl::StrCat(
                           "\nforecast: ", HumanDuration(absl::Seconds(62)), " (text ",
                           HumanDuration(absl::Seconds(1)), ", denoise ",
                           HumanDuration(absl::Seconds(58)), ", decode ",
                           HumanDuration(absl::Seconds(3)), "), 3.5 TFLOP, transfer rank-local, ",
                           HumanBytes(3'000'000), " over the bus of each rank\n")));
  EXPECT_THAT(ran.out,
              HasSubstr("plan: text_encoder 30 blocks x 2, then transformer 30 blocks x 4\n"));
}

TEST_F(JobCommandsTest, GetPrintsWhatIsKnown) {
  const Ran done = Run({"get", "done"});
  EXPECT_EQ(done.code, 0) << done.err;
  EXPECT_EQ(done.out,
            absl::StrCat("id: done\nstate: succeeded\nsettings: 32 x 32, 5 frames at 16 fps, 4 "
                         "steps, guidance 5, shift 3, unipc, seed 7\ncreated: "
                         "2027-01-15T08:00:00Z\nresult: video/mp4, 95 B\nsha256: ",
                         Sha256Of(service_.video),
                         "\ntimes: 2.00 s (queue 0.00 s, text 0.00 s, denoise 2.00 s, decode 0.00 "
                         "s, encode 0.00 s)\n"));
  EXPECT_THAT(Run({"get", "failed"}).out, HasSubstr("failed: no memory [2J (OUT_OF_MEMORY)\n"));
}

TEST_F(JobCommandsTest, ListWalksThePages) {
  Ran ran = Run({"list", "--limit", "3"});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(std::count(ran.out.begin(), ran.out.end(), '\n'), 3);
  EXPECT_THAT(ran.out, HasSubstr("job2\tdenoising 0/4\t2027-01-15T08:00:00Z\t32 x 32"));
  service_.list_requests.clear();
  ran = Run({"list", "--limit", "0", "--state", "queued", "--state", "encoding-text"});
  EXPECT_EQ(std::count(ran.out.begin(), ran.out.end(), '\n'), 5);
  ASSERT_EQ(service_.list_requests.size(), 3u);
  for (const v1::ListJobsRequest& request : service_.list_requests) {
    EXPECT_THAT(request.states(), ElementsAre(v1::JOB_STATE_QUEUED, v1::JOB_STATE_ENCODING_TEXT));
  }
}

TEST_F(JobCommandsTest, WatchShowsProgressAndEndsAsTheJobDoes) {
  Ran ran = Run({"watch", "done"});
  EXPECT_EQ(ran.code, 0);
  EXPECT_THAT(ran.err, HasSubstr("denoising 3/4\n"));
  EXPECT_THAT(ran.err, HasSubstr("done in 2.00 s"));
  ran = Run({"watch", "failed", "--quiet"});
  EXPECT_EQ(ran.code, 1);
  EXPECT_EQ(ran.err, "dlo-client: job failed failed: no memory [2J (OUT_OF_MEMORY)\n");
}

TEST_F(JobCommandsTest, AnInterruptedWatchLeavesTheJob) {
  std::thread presser([&] {
    service_.watched.WaitForNotification();
    interrupt_.Trigger(SIGINT);
  });
  const Ran ran = Run({"watch", "running", "-q"});
  presser.join();
  EXPECT_EQ(ran.code, 130);
  EXPECT_THAT(ran.err, HasSubstr("interrupted; the job is left as it is"));
}

TEST_F(JobCommandsTest, DownloadGoesOnWhereItBrokeOff) {
  service_.breaks = 2;
  const std::string path = files_ / "a.mp4";
  const Ran ran = Run({"download", "done", "-o", path});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.out, path + "\n");
  EXPECT_THAT(service_.offsets, ElementsAre(0, 20, 40));
  EXPECT_EQ(TestFolder::Read(path), service_.video);
  EXPECT_THAT(files_.names(), ElementsAre("a.mp4"));
}

TEST_F(JobCommandsTest, ATimelineIsAskedForAtSubmissionAndFetchedWithTheVideo) {
  EXPECT_EQ(Run({"submit", "--prompt", "a ball", "--trace"}).code, 0);
  EXPECT_TRUE(service_.submitted.trace());
  const std::string video = files_ / "a.mp4", timeline = files_ / "a.json";
  const Ran ran = Run({"download", "done", "-o", video, "--trace", timeline});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.out, video + "\n" + timeline + "\n");
  EXPECT_THAT(files_.names(), ::testing::UnorderedElementsAre("a.mp4", "a.json"));
}

TEST_F(JobCommandsTest, TheNextDownloadGoesOnWhereABrokenOneEnded) {
  service_.breaks = 1;
  service_.broken = grpc::StatusCode::INTERNAL;
  const std::string path = files_ / "a.mp4";
  Ran ran = Run({"download", "done", "-o", path});
  EXPECT_EQ(ran.code, 1);
  ASSERT_EQ(files_.names().size(), 1u);
  EXPECT_THAT(ran.err, HasSubstr(absl::StrCat("20 B are kept in ",
                                              (files_ / *files_.names().begin()).string(),
                                              "; the same command goes on there")));
  ran = Run({"download", "done", "-o", path});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(service_.offsets, ElementsAre(0, 20));
  EXPECT_EQ(TestFolder::Read(path), service_.video);
  EXPECT_THAT(files_.names(), ElementsAre("a.mp4"));
}

TEST_F(JobCommandsTest, ADownloadThatGoesWrongLeavesNoFile) {
  Ran ran = Run({"download", "done", "-o", files_ / "a.png"});
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.err, HasSubstr("the job's result is video/mp4"));
  ran = Run({"download", "nobody", "-o", files_ / "a.mp4"});
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.err, HasSubstr("there is no job \"nobody\""));
  service_.video[50] = 'x';
  ran = Run({"download", "done", "-q", "-o", files_ / "a.mp4"});
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.err, HasSubstr("SHA-256"));
  service_.video.resize(90);
  ran = Run({"download", "done", "-q", "-o", files_ / "a.mp4"});
  EXPECT_THAT(ran.err, HasSubstr("90 of the 95 bytes"));
  EXPECT_THAT(files_.names(), IsEmpty());
}

TEST_F(JobCommandsTest, CancelPrintsTheStateAndDeleteNothing) {
  Ran ran = Run({"cancel", "running"});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.out, "cancelled\n");
  ran = Run({"delete", "done"});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.out + ran.err, "");
  EXPECT_EQ(service_.jobs.count("done"), 0u);
}

TEST_F(JobCommandsTest, UnknownIdsAndWrongCommandLinesAreOneLine) {
  for (const char* command : {"get", "watch", "cancel", "delete"}) {
    const Ran ran = Run({command, "nobody"});
    EXPECT_EQ(ran.code, 1) << command;
    EXPECT_EQ(ran.out, "");
    EXPECT_EQ(ran.err, "dlo-client: there is no job \"nobody\"\n") << command;
    EXPECT_EQ(Run({command}).code, 2) << command;
  }
  for (const std::vector<std::string>& args : {std::vector<std::string>{"list", "--state", "odd"},
                                               {"list", "--limit", "-1"},
                                               {"submit", "--prompt", "x", "--format", "gif"},
                                               {"submit"},
                                               {"download", "done"}}) {
    const Ran ran = Run(args);
    EXPECT_EQ(ran.code, 2) << args[0];
    EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
  }
}

}  // namespace
}  // namespace dlo
