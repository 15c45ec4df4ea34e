// The job calls over gRPC, with real (scripted) worker processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <future>
#include <thread>

#include "base/sha256.h"
#include "proto/convert.h"
#include "server/testing/frontend_harness.h"

namespace dlo {
namespace {

using grpc::StatusCode;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::unique_ptr<grpc::ClientContext> NewContext() {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_wait_for_ready(true);
  context->set_deadline(absl::ToChronoTime(absl::Now() + kTestTimeout));
  return context;
}

// A WatchJob call.
class Watch {
 public:
  Watch(v1::VideoGeneration::Stub& stub, const std::string& id) {
    v1::WatchJobRequest request;
    request.set_id(id);
    reader_ = stub.WatchJob(context_.get(), request);
  }
  ~Watch() {
    context_->TryCancel();
    if (!finished_) Finish();
  }

  bool ReadUntil(const std::function<bool(const v1::GenerateEvent&)>& found) {
    v1::GenerateEvent event;
    while (reader_->Read(&event)) {
      if (event.has_job()) {
        states_.push_back(event.job().state());
        last_job_ = event.job();
      }
      if (found(event)) return true;
    }
    return false;
  }
  bool ReadUntilState(v1::JobState state) {
    return ReadUntil([state](const v1::GenerateEvent& event) {
      return event.has_job() && event.job().state() == state;
    });
  }
  bool ReadUntilStep(int step) {
    return ReadUntil([step](const v1::GenerateEvent& event) {
      return event.progress().step() == step || event.job().progress().step() == step;
    });
  }
  grpc::Status Finish() {
    ReadUntil([](const v1::GenerateEvent&) { return false; });
    finished_ = true;
    return reader_->Finish();
  }

  const std::vector<v1::JobState>& states() const { return states_; }
  const v1::Job& last_job() const { return last_job_; }

 private:
  const std::unique_ptr<grpc::ClientContext> context_ = NewContext();
  std::unique_ptr<grpc::ClientReader<v1::GenerateEvent>> reader_;
  std::vector<v1::JobState> states_;
  v1::Job last_job_;
  bool finished_ = false;
};

// A server that can be started again on the same data, and one client of it.
class JobsTest : public testing::Test {
 protected:
  void Start() {
    harness_.Start();
    stub_ = v1::VideoGeneration::NewStub(harness_.channel());
  }
  void Restart() {
    harness_.Stop();
    Start();
  }

  // The request whose run waits after step `step` until Touch(`file`).
  std::string Hold(const std::string& file, int step = 1) {
    return absl::StrCat("hold_step=", step, ":", harness_.Path(file));
  }

  grpc::Status Submit(const v1::GenerateRequest& request, v1::Job* job) {
    return stub_->SubmitJob(NewContext().get(), request, job);
  }
  v1::Job Submit(const std::string& prompt, const std::string& id) {
    v1::Job job;
    const grpc::Status status = Submit(FrontendHarness::Request(prompt, id), &job);
    EXPECT_TRUE(status.ok()) << id << ": " << status.error_message();
    return job;
  }
  grpc::Status Get(const std::string& id, v1::Job* job) {
    v1::GetJobRequest request;
    request.set_id(id);
    return stub_->GetJob(NewContext().get(), request, job);
  }
  v1::Job Get(const std::string& id) {
    v1::Job job;
    const grpc::Status status = Get(id, &job);
    EXPECT_TRUE(status.ok()) << id << ": " << status.error_message();
    return job;
  }
  grpc::Status Cancel(const std::string& id, v1::Job* job) {
    v1::CancelJobRequest request;
    request.set_id(id);
    return stub_->CancelJob(NewContext().get(), request, job);
  }
  grpc::Status Delete(const std::string& id) {
    v1::DeleteJobRequest request;
    request.set_id(id);
    v1::DeleteJobResponse response;
    return stub_->DeleteJob(NewContext().get(), request, &response);
  }
  grpc::Status Download(const std::string& id, int64_t offset, std::string* bytes,
                        bool timeline = false) {
    v1::DownloadResultRequest request;
    request.set_id(id);
    request.set_offset(offset);
    request.set_timeline(timeline);
    const auto context = NewContext();
    const auto reader = stub_->DownloadResult(context.get(), request);
    bytes->clear();
    v1::ResultChunk chunk;
    while (reader->Read(&chunk)) {
      EXPECT_EQ(chunk.offset(), offset + static_cast<int64_t>(bytes->size()));
      EXPECT_LE(chunk.data().size(), size_t{1} << 20);
      *bytes += chunk.data();
    }
    return reader->Finish();
  }
  v1::Job WaitEnd(const std::string& id) {
    Watch watch(*stub_, id);
    const grpc::Status status = watch.Finish();
    EXPECT_TRUE(status.ok()) << id << ": " << status.error_message();
    return watch.last_job();
  }
  grpc::Status List(const v1::ListJobsRequest& request, std::vector<std::string>* ids,
                    std::string* next = nullptr) {
    v1::ListJobsResponse response;
    const grpc::Status status = stub_->ListJobs(NewContext().get(), request, &response);
    for (const v1::Job& job : response.jobs()) ids->push_back(job.id());
    if (next != nullptr) *next = response.next_page_token();
    return status;
  }
  std::vector<std::string> ResultFiles() {
    std::vector<std::string> names;
    for (const auto& file : std::filesystem::directory_iterator(harness_.Path("data/results"))) {
      names.push_back(file.path().filename());
    }
    return names;
  }

  FrontendHarness harness_;
  std::unique_ptr<v1::VideoGeneration::Stub> stub_;
};

// 128 frames of 128x128: 25 MB of float32.
v1::GenerateRequest BigRequest(const std::string& id) {
  v1::GenerateRequest request = FrontendHarness::Request("big", id);
  request.mutable_settings()->set_width(128);
  request.mutable_settings()->set_height(128);
  request.mutable_settings()->set_num_frames(128);
  return request;
}

TEST_F(JobsTest, SubmitWatchDownload) {
  Start();
  v1::GenerateRequest request = BigRequest("");
  request.mutable_settings()->clear_seed();
  v1::Job submitted;
  ASSERT_TRUE(Submit(request, &submitted).ok());
  EXPECT_EQ(submitted.id().size(), 36u);
  EXPECT_EQ(submitted.settings().num_inference_steps(), 4);
  EXPECT_TRUE(submitted.settings().has_seed());
  const v1::Job job = WaitEnd(submitted.id());
  EXPECT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(job.settings().seed(), submitted.settings().seed());
  EXPECT_EQ(FromProto(job.expire_time()) - FromProto(job.end_time()), absl::Hours(24));
  EXPECT_EQ(job.progress().step(), 4);
  EXPECT_EQ(Get(job.id()).SerializeAsString(), job.SerializeAsString());

  std::string video;
  ASSERT_TRUE(Download(job.id(), 0, &video).ok());
  EXPECT_GT(video.size(), 25'000'000u);
  EXPECT_EQ(job.result().size_bytes(), static_cast<int64_t>(video.size()));
  EXPECT_EQ(job.result().sha256(), Sha256Of(video));
  // A download that broke off goes on where it was.
  std::string rest;
  ASSERT_TRUE(Download(job.id(), 1234567, &rest).ok());
  EXPECT_TRUE(video.substr(1234567) == rest);
  ASSERT_TRUE(Download(job.id(), job.result().size_bytes(), &rest).ok());
  EXPECT_EQ(rest, "");
  EXPECT_EQ(Download(job.id(), job.result().size_bytes() + 1, &rest).error_code(),
            StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(Download(job.id(), -1, &rest).error_code(), StatusCode::OUT_OF_RANGE);
}

TEST_F(JobsTest, ATimelineIsKeptBesideTheResultAndGoesWithIt) {
  Start();
  v1::GenerateRequest request = FrontendHarness::Request("a", "traced");
  request.set_trace(true);
  v1::Job job;
  ASSERT_TRUE(Submit(request, &job).ok());
  job = WaitEnd("traced");
  std::string timeline;
  ASSERT_TRUE(Download("traced", 0, &timeline, /*timeline=*/true).ok());
  EXPECT_EQ(timeline, "{\"traceEvents\":[]}\n");
  EXPECT_EQ(job.result().timeline_bytes(), static_cast<int64_t>(timeline.size()));
  EXPECT_THAT(ResultFiles(), testing::UnorderedElementsAre("traced.result", "traced.timeline"));

  // Another job has none, and says so.
  Submit("b", "plain");
  EXPECT_EQ(WaitEnd("plain").result().timeline_bytes(), 0);
  const grpc::Status none = Download("plain", 0, &timeline, /*timeline=*/true);
  EXPECT_EQ(none.error_code(), StatusCode::NOT_FOUND);
  EXPECT_THAT(none.error_message(), HasSubstr("job plain has no timeline"));

  Restart();
  ASSERT_TRUE(Download("traced", 0, &timeline, /*timeline=*/true).ok());
  EXPECT_EQ(timeline, "{\"traceEvents\":[]}\n");
  ASSERT_TRUE(Delete("traced").ok());
  EXPECT_THAT(ResultFiles(), ElementsAre("plain.result"));
}

TEST_F(JobsTest, AQueuedJobIsStillTracedAfterARestart) {
  Start();
  Submit(Hold("go"), "running");
  v1::GenerateRequest request = FrontendHarness::Request("a", "queued");
  request.set_trace(true);
  v1::Job job;
  ASSERT_TRUE(Submit(request, &job).ok());
  Restart();
  harness_.Touch("go");
  EXPECT_GT(WaitEnd("queued").result().timeline_bytes(), 0);
}

TEST_F(JobsTest, WhatARankStreamedIsInTheResult) {
  Start();
  Submit("streams", "a");
  const v1::Job job = WaitEnd("a");
  ASSERT_EQ(job.result().ranks_size(), 1);
  ASSERT_EQ(job.result().ranks(0).streaming_size(), 1);
  const v1::StageStreaming& streaming = job.result().ranks(0).streaming(0);
  EXPECT_EQ(streaming.stage(), v1::JOB_STATE_DENOISING);
  EXPECT_EQ(streaming.visits(), 40);
  EXPECT_EQ(streaming.bus_bytes(), 3 << 20);
  EXPECT_EQ(streaming.fabric_bytes(), 9 << 20);
  EXPECT_EQ(FromProto(streaming.copy_stall()), absl::Milliseconds(150));
  EXPECT_EQ(FromProto(streaming.gather_stall()), absl::Milliseconds(50));
  EXPECT_EQ(FromProto(streaming.copy_time()), absl::Milliseconds(800));
  EXPECT_EQ(streaming.hidden_ratio(), 0.75);
  Submit("resident", "b");
  EXPECT_EQ(WaitEnd("b").result().ranks(0).streaming_size(), 0);
}

TEST_F(JobsTest, AnUnknownIdIsNotFoundByEveryCall) {
  Start();
  v1::Job job;
  std::string bytes;
  for (const std::string id : {"nobody", "", "../lock", "x\nO'"}) {
    EXPECT_EQ(Get(id, &job).error_code(), StatusCode::NOT_FOUND);
    EXPECT_EQ(Cancel(id, &job).error_code(), StatusCode::NOT_FOUND);
    EXPECT_EQ(Delete(id).error_code(), StatusCode::NOT_FOUND);
    EXPECT_EQ(Download(id, 0, &bytes).error_code(), StatusCode::NOT_FOUND);
    EXPECT_EQ(Watch(*stub_, id).Finish().error_code(), StatusCode::NOT_FOUND);
  }
  EXPECT_EQ(Detail<google::rpc::ErrorInfo>(Get("nobody", &job)).reason(), "JOB_NOT_FOUND");
}

TEST_F(JobsTest, WrongFieldsAreNamedAndNothingIsRecorded) {
  Start();
  v1::GenerateRequest request = FrontendHarness::Request("", "not ok!");
  v1::Job job;
  const grpc::Status status = Submit(request, &job);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Detail<google::rpc::BadRequest>(status).field_violations_size(), 2);
  std::vector<std::string> ids;
  EXPECT_TRUE(List({}, &ids).ok());
  EXPECT_THAT(ids, IsEmpty());
}

TEST_F(JobsTest, ValidateOnlyAnswersTheResolvedRequestAndRunsNothing) {
  Start();
  v1::GenerateRequest request = FrontendHarness::Request("exit=1", "a");
  request.set_validate_only(true);
  request.mutable_settings()->set_width(32);
  v1::Job job;
  ASSERT_TRUE(Submit(request, &job).ok());
  EXPECT_EQ(job.id(), "");
  EXPECT_EQ(job.state(), v1::JOB_STATE_UNSPECIFIED);
  EXPECT_EQ(job.settings().width(), 32);
  EXPECT_EQ(job.settings().num_inference_steps(), 4);
  TestCall call(harness_.channel(), request);
  EXPECT_TRUE(call.Finish().ok());
  ASSERT_EQ(call.events().size(), 1u);
  EXPECT_EQ(call.last_job().settings().SerializeAsString(), job.settings().SerializeAsString());
  EXPECT_EQ(Get("a", &job).error_code(), StatusCode::NOT_FOUND);
  request.mutable_settings()->set_width(17);
  EXPECT_EQ(Submit(request, &job).error_code(), StatusCode::INVALID_ARGUMENT);
}

TEST_F(JobsTest, AForecastKnowsThePlanAtOnceAndTheTimeOnceARequestHasRun) {
  harness_.options().forecaster.work = [](const JobSpec& spec) -> absl::StatusOr<RequestWork> {
    RequestWork work{.plan = VisitPlan({7})};
    work.plan.Add(0, spec.settings.num_inference_steps);
    work.rings = {{"transformer", BlockLayout::Of({TensorSpec{.shape = {256}}})}};
    work.text_flops = work.decode_flops = 1;
    work.denoise_flops = spec.settings.num_inference_steps;
    return work;
  };
  harness_.options().forecaster.transfer = "rank-local";
  harness_.options().forecaster.sharers = 1;
  Start();
  v1::GenerateRequest request = FrontendHarness::Request("steps_ms=20");
  request.set_validate_only(true);
  v1::Job job;
  ASSERT_TRUE(Submit(request, &job).ok());
  EXPECT_FALSE(job.forecast().has_run_time());
  EXPECT_EQ(job.forecast().plan_digest(), "7:0x4");
  EXPECT_EQ(job.forecast().bus_bytes(), 4 * 7 * 1024);
  EXPECT_EQ(job.forecast().transfer(), "rank-local");

  TestCall ran(harness_.channel(), FrontendHarness::Request("steps_ms=20"));
  ASSERT_TRUE(ran.Finish().ok());
  EXPECT_FALSE(ran.last_job().has_forecast());
  request.mutable_settings()->set_num_inference_steps(8);
  TestCall asked(harness_.channel(), request);
  ASSERT_TRUE(asked.Finish().ok());
  const v1::Forecast& forecast = asked.last_job().forecast();
  EXPECT_EQ(forecast.plan_digest(), "7:0x8");
  EXPECT_EQ(FromProto(forecast.times().denoise()),
            2 * FromProto(ran.last_job().result().times().denoise()));
  EXPECT_GE(FromProto(forecast.run_time()), absl::Milliseconds(160));
}

TEST_F(JobsTest, ARepeatedRequestIdReturnsTheFirstJobWhetherItRunsOrHasEnded) {
  Start();
  const v1::Job first = Submit(Hold("go"), "same");
  Watch watch(*stub_, "same");
  ASSERT_TRUE(watch.ReadUntilStep(1));
  const v1::Job again = Submit("another prompt", "same");
  EXPECT_EQ(again.state(), v1::JOB_STATE_DENOISING);
  EXPECT_EQ(again.create_time().nanos(), first.create_time().nanos());
  TestCall generate(harness_.channel(), FrontendHarness::Request("x", "same"));
  ASSERT_TRUE(generate.ReadUntilState(v1::JOB_STATE_DENOISING));
  harness_.Touch("go");
  EXPECT_TRUE(generate.Finish().ok());
  EXPECT_EQ(generate.last_job().result().sha256(), Sha256Of(generate.video()));
  EXPECT_TRUE(watch.Finish().ok());
  EXPECT_EQ(Submit("x", "same").SerializeAsString(), watch.last_job().SerializeAsString());
  TestCall late(harness_.channel(), FrontendHarness::Request("x", "same"));
  EXPECT_TRUE(late.Finish().ok());
  EXPECT_EQ(late.video(), generate.video());
  std::vector<std::string> ids;
  EXPECT_TRUE(List({}, &ids).ok());
  EXPECT_THAT(ids, ElementsAre("same"));
}

TEST_F(JobsTest, OfManySubmissionsOfAnIdAtOnceOneRuns) {
  Start();
  std::vector<std::future<v1::Job>> submissions;
  for (int i = 0; i < 16; ++i) {
    submissions.push_back(std::async(std::launch::async, [&] { return Submit("x", "same"); }));
  }
  for (auto& submission : submissions) EXPECT_EQ(submission.get().id(), "same");
  EXPECT_EQ(WaitEnd("same").state(), v1::JOB_STATE_SUCCEEDED);
  std::vector<std::string> ids;
  EXPECT_TRUE(List({}, &ids).ok());
  EXPECT_THAT(ids, ElementsAre("same"));
}

TEST_F(JobsTest, AFullQueueRefusesAndRecordsNothing) {
  harness_.options().scheduler.max_waiting = 1;
  Start();
  Submit(Hold("go"), "running");
  Watch watch(*stub_, "running");
  ASSERT_TRUE(watch.ReadUntilStep(1));
  Submit("x", "waiting");
  v1::Job job;
  const grpc::Status status = Submit(FrontendHarness::Request("x", "late"), &job);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_GE(Detail<google::rpc::RetryInfo>(status).retry_delay().seconds(), 1);
  EXPECT_EQ(Get("late", &job).error_code(), StatusCode::NOT_FOUND);
  // One that is known is found all the same.
  EXPECT_EQ(Submit("x", "waiting").state(), v1::JOB_STATE_QUEUED);
  harness_.Touch("go");
  EXPECT_EQ(WaitEnd("waiting").state(), v1::JOB_STATE_SUCCEEDED);
  Submit("x", "late");
  EXPECT_EQ(WaitEnd("late").state(), v1::JOB_STATE_SUCCEEDED);
}

TEST_F(JobsTest, EveryWatcherSeesTheJobFromWhereItIsAndLeavingDoesNotCancel) {
  Start();
  Submit(absl::StrCat(Hold("go1", 2), " ", Hold("go2", 3)), "a");
  auto first = std::make_unique<Watch>(*stub_, "a");
  ASSERT_TRUE(first->ReadUntilStep(2));
  Watch second(*stub_, "a");
  ASSERT_TRUE(second.ReadUntilState(v1::JOB_STATE_DENOISING));
  EXPECT_EQ(second.last_job().progress().step(), 2);
  first.reset();
  harness_.Touch("go1");
  ASSERT_TRUE(second.ReadUntilStep(3));
  Watch third(*stub_, "a");
  ASSERT_TRUE(third.ReadUntilStep(3));
  harness_.Touch("go2");
  EXPECT_TRUE(second.Finish().ok());
  EXPECT_TRUE(third.Finish().ok());
  EXPECT_THAT(second.states(), ElementsAre(v1::JOB_STATE_DENOISING, v1::JOB_STATE_DECODING,
                                           v1::JOB_STATE_SUCCEEDED));
  EXPECT_THAT(third.states(), testing::ElementsAreArray(second.states()));
  Watch late(*stub_, "a");
  EXPECT_TRUE(late.Finish().ok());
  EXPECT_THAT(late.states(), ElementsAre(v1::JOB_STATE_SUCCEEDED));
}

TEST_F(JobsTest, CancelAnswersAtOnceAndTheSameWorkerServesTheNextJob) {
  Start();
  ASSERT_TRUE(harness_.WaitServing(true));
  const std::vector<int> workers = FrontendHarness::WorkerPids();
  Submit(Hold("never", 2), "running");
  Watch watch(*stub_, "running");
  ASSERT_TRUE(watch.ReadUntilStep(2));
  Submit("exit=1", "waiting");
  v1::Job job;
  ASSERT_TRUE(Cancel("waiting", &job).ok());
  EXPECT_EQ(job.state(), v1::JOB_STATE_CANCELLED);
  ASSERT_TRUE(Cancel("running", &job).ok());
  EXPECT_EQ(job.state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(job.progress().step(), 2);
  EXPECT_TRUE(job.has_expire_time());
  EXPECT_FALSE(job.has_result());
  EXPECT_TRUE(watch.Finish().ok());
  EXPECT_EQ(watch.last_job().state(), v1::JOB_STATE_CANCELLED);
  // Had the cancelled waiting job run, it would have killed the worker.
  Submit("x", "next");
  const v1::Job next = WaitEnd("next");
  EXPECT_EQ(next.state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(FrontendHarness::WorkerPids(), workers);

  ASSERT_TRUE(Cancel("running", &job).ok());
  EXPECT_EQ(job.state(), v1::JOB_STATE_CANCELLED);
  ASSERT_TRUE(Cancel("next", &job).ok());
  EXPECT_EQ(job.SerializeAsString(), next.SerializeAsString());
  std::string bytes;
  const grpc::Status status = Download("running", 0, &bytes);
  EXPECT_EQ(status.error_code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Detail<google::rpc::ErrorInfo>(status).reason(), "NO_RESULT");
}

TEST_F(JobsTest, TheClientOfAGenerateCallCancelsItsJobByLeavingButNotAnothers) {
  Start();
  Submit(Hold("go"), "submitted");
  Watch watch(*stub_, "submitted");
  ASSERT_TRUE(watch.ReadUntilStep(1));
  {
    TestCall visitor(harness_.channel(), FrontendHarness::Request("x", "submitted"));
    ASSERT_TRUE(visitor.ReadUntilState(v1::JOB_STATE_DENOISING));
    TestCall owner(harness_.channel(), FrontendHarness::Request("exit=1", "owned"));
    ASSERT_TRUE(owner.ReadUntilState(v1::JOB_STATE_QUEUED));
  }
  EXPECT_EQ(WaitEnd("owned").state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(Get("submitted").state(), v1::JOB_STATE_DENOISING);
  harness_.Touch("go");
  EXPECT_EQ(WaitEnd("submitted").state(), v1::JOB_STATE_SUCCEEDED);
}

TEST_F(JobsTest, AFailureSaysWhatHappened) {
  Start();
  Submit("oom", "oom");
  v1::Job job = WaitEnd("oom");
  EXPECT_EQ(job.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(job.failure().code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(job.failure().reason(), "OUT_OF_MEMORY");
  EXPECT_THAT(job.failure().message(), HasSubstr("no memory for the attention"));
  Submit("signal=9", "lost");
  job = WaitEnd("lost");
  EXPECT_EQ(job.failure().reason(), "RANK_LOST");
  EXPECT_EQ(job.failure().code(), StatusCode::UNAVAILABLE);
  // A Generate call that comes to it ends the same way.
  TestCall call(harness_.channel(), FrontendHarness::Request("x", "lost"));
  const grpc::Status status = call.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(Detail<google::rpc::ErrorInfo>(status).reason(), "RANK_LOST");
  EXPECT_EQ(call.last_job().state(), v1::JOB_STATE_FAILED);
}

TEST_F(JobsTest, ARunningJobHasNoResultYet) {
  Start();
  Submit(Hold("go"), "a");
  std::string bytes;
  const grpc::Status status = Download("a", 0, &bytes);
  EXPECT_EQ(status.error_code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Detail<google::rpc::ErrorInfo>(status).reason(), "NOT_FINISHED");
  harness_.Touch("go");
  WaitEnd("a");
  EXPECT_TRUE(Download("a", 0, &bytes).ok());
}

TEST_F(JobsTest, DeleteRemovesAJobAndItsResultAndCancelsItFirst) {
  Start();
  Submit("x", "ended");
  WaitEnd("ended");
  Submit(Hold("never"), "running");
  Watch watch(*stub_, "running");
  ASSERT_TRUE(watch.ReadUntilStep(1));
  EXPECT_TRUE(Delete("ended").ok());
  EXPECT_TRUE(Delete("running").ok());
  EXPECT_TRUE(watch.Finish().ok());
  EXPECT_EQ(watch.last_job().state(), v1::JOB_STATE_CANCELLED);
  v1::Job job;
  for (const char* id : {"ended", "running"}) {
    EXPECT_EQ(Get(id, &job).error_code(), StatusCode::NOT_FOUND);
    EXPECT_EQ(Delete(id).error_code(), StatusCode::NOT_FOUND);
  }
  // The id is free again.
  Submit("x", "running");
  EXPECT_EQ(WaitEnd("running").state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_THAT(ResultFiles(), ElementsAre("running.result"));
}

TEST_F(JobsTest, ListsByStateAndPage) {
  Start();
  for (int i = 0; i < 5; ++i) {
    Submit(i % 2 == 0 ? "x" : "fail", absl::StrCat(i));
    WaitEnd(absl::StrCat(i));
  }
  Submit(Hold("go"), "running");
  Watch watch(*stub_, "running");
  ASSERT_TRUE(watch.ReadUntilStep(1));
  Submit("x", "waiting");

  std::vector<std::string> ids;
  EXPECT_TRUE(List({}, &ids).ok());
  EXPECT_THAT(ids, ElementsAre("waiting", "running", "4", "3", "2", "1", "0"));
  v1::ListJobsRequest request;
  request.set_page_size(3);
  std::string next;
  ids.clear();
  EXPECT_TRUE(List(request, &ids, &next).ok());
  EXPECT_THAT(ids, ElementsAre("waiting", "running", "4"));
  // What comes in between shifts nothing.
  Submit("x", "between");
  ids.clear();
  while (!next.empty()) {
    request.set_page_token(next);
    EXPECT_TRUE(List(request, &ids, &next).ok());
  }
  EXPECT_THAT(ids, ElementsAre("3", "2", "1", "0"));

  request.Clear();
  request.add_states(v1::JOB_STATE_FAILED);
  request.add_states(v1::JOB_STATE_DENOISING);
  request.set_page_size(2);
  ids.clear();
  EXPECT_TRUE(List(request, &ids, &next).ok());
  EXPECT_THAT(ids, ElementsAre("running", "3"));
  request.set_page_token(next);
  EXPECT_TRUE(List(request, &ids, &next).ok());
  EXPECT_THAT(ids, ElementsAre("running", "3", "1"));
  EXPECT_EQ(next, "");

  request.clear_states();
  EXPECT_EQ(List(request, &ids).error_code(), StatusCode::INVALID_ARGUMENT);
  request.set_page_token("nonsense");
  request.set_page_size(1001);
  request.add_states(v1::JOB_STATE_UNSPECIFIED);
  request.add_states(static_cast<v1::JobState>(99));
  const auto detail = Detail<google::rpc::BadRequest>(List(request, &ids));
  EXPECT_EQ(detail.field_violations_size(), 4);
  harness_.Touch("go");
  WaitEnd("waiting");
}

TEST_F(JobsTest, ResultsAreRemovedWhenTheirTimeIsUp) {
  harness_.options().jobs.result_ttl = absl::Milliseconds(300);
  Start();
  Submit("x", "a");
  WaitEnd("a");
  v1::Job job;
  bool gone = false;
  for (const absl::Time end = absl::Now() + kTestTimeout; !gone && absl::Now() < end;) {
    gone = Get("a", &job).error_code() == StatusCode::NOT_FOUND;
  }
  EXPECT_TRUE(gone);
  EXPECT_THAT(ResultFiles(), IsEmpty());
}

TEST_F(JobsTest, TheOldestResultsGoWhenThereIsNoRoomAndOneThatNeverFitsFails) {
  // A small video has 15 kB.
  harness_.options().store.bytes_max = 40'000;
  harness_.options().jobs.result_bytes_max = 40'000;
  Start();
  for (const char* id : {"a", "b", "c"}) {
    Submit("x", id);
    EXPECT_EQ(WaitEnd(id).state(), v1::JOB_STATE_SUCCEEDED);
  }
  v1::Job job;
  EXPECT_EQ(Get("a", &job).error_code(), StatusCode::NOT_FOUND);
  std::string bytes;
  EXPECT_TRUE(Download("b", 0, &bytes).ok());
  ASSERT_TRUE(Submit(BigRequest("big"), &job).ok());
  job = WaitEnd("big");
  EXPECT_EQ(job.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(job.failure().reason(), "RESULT_TOO_LARGE");
  EXPECT_TRUE(Download("c", 0, &bytes).ok());
}

// The kernel refuses writes beyond RLIMIT_FSIZE as it does on a full disk, but to one file: the
// records go on.
TEST_F(JobsTest, AFullDiskFailsTheJobWithTheReasonAndHarmsNobody) {
  signal(SIGXFSZ, SIG_IGN);
  Start();
  v1::Job job;
  Submit(Hold("go"), "blocker");
  ASSERT_TRUE(Submit(BigRequest("big"), &job).ok());
  Submit("x", "next");
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit limit = before;
  limit.rlim_cur = 8 << 20;
  setrlimit(RLIMIT_FSIZE, &limit);
  harness_.Touch("go");
  job = WaitEnd("big");
  const v1::Job next = WaitEnd("next");
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(job.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(job.failure().code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(job.failure().reason(), "DISK_FULL");
  EXPECT_THAT(job.failure().message(), HasSubstr("data/results"));
  EXPECT_EQ(next.state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(ResultFiles().size(), 2u);  // of blocker and next
}

// No room for records either: nothing is accepted that could be lost, what runs ends truthfully,
// and all is well again when there is room.
TEST_F(JobsTest, WhenRecordsCannotBeWrittenNothingIsAcceptedAndEndsAreToldAllTheSame) {
  signal(SIGXFSZ, SIG_IGN);
  Start();
  Submit(Hold("go"), "running");
  Watch watch(*stub_, "running");
  ASSERT_TRUE(watch.ReadUntilState(v1::JOB_STATE_DENOISING));
  ASSERT_TRUE(watch.ReadUntilStep(1));
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit limit = before;
  limit.rlim_cur = 1;
  setrlimit(RLIMIT_FSIZE, &limit);
  v1::Job job;
  const grpc::Status refused = Submit(FrontendHarness::Request("x", "late"), &job);
  harness_.Touch("go");
  EXPECT_TRUE(watch.Finish().ok());
  const v1::Job told = watch.last_job();
  const v1::Job got = Get("running");
  v1::ListJobsResponse list;
  EXPECT_TRUE(stub_->ListJobs(NewContext().get(), {}, &list).ok());
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_FALSE(refused.ok());
  EXPECT_EQ(told.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(told.failure().reason(), "DISK_FULL");
  EXPECT_EQ(got.SerializeAsString(), told.SerializeAsString());
  ASSERT_EQ(list.jobs_size(), 1);
  EXPECT_EQ(list.jobs(0).SerializeAsString(), told.SerializeAsString());
  Submit("x", "late");
  EXPECT_EQ(WaitEnd("late").state(), v1::JOB_STATE_SUCCEEDED);
  Restart();
  EXPECT_EQ(Get("running").SerializeAsString(), told.SerializeAsString());
}

TEST_F(JobsTest, AStoppedServerLeavesQueuedJobsToTheNextAndKeepsResults) {
  Start();
  Submit("x", "ended");
  const v1::Job ended = WaitEnd("ended");
  Submit(Hold("never"), "running");
  Watch running(*stub_, "running");
  ASSERT_TRUE(running.ReadUntilStep(1));
  const v1::Job waiting = Submit("x", "waiting");
  TestCall generate(harness_.channel(), FrontendHarness::Request("x", "generate"));
  ASSERT_TRUE(generate.ReadUntilState(v1::JOB_STATE_QUEUED));
  Watch watch(*stub_, "waiting");
  ASSERT_TRUE(watch.ReadUntilState(v1::JOB_STATE_QUEUED));

  std::thread stop([&] { harness_.frontend().Shutdown(absl::Milliseconds(100)); });
  const grpc::Status watched = watch.Finish();
  EXPECT_EQ(watched.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(Detail<google::rpc::ErrorInfo>(watched).reason(), "SHUTTING_DOWN");
  EXPECT_EQ(generate.Finish().error_code(), StatusCode::UNAVAILABLE);
  EXPECT_TRUE(running.Finish().ok());
  EXPECT_EQ(running.last_job().state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(running.last_job().failure().reason(), "SHUTTING_DOWN");
  stop.join();
  Restart();

  EXPECT_EQ(Submit("x", "ended").SerializeAsString(), ended.SerializeAsString());
  std::string bytes;
  EXPECT_TRUE(Download("ended", 0, &bytes).ok());
  EXPECT_EQ(ended.result().sha256(), Sha256Of(bytes));
  const v1::Job finished = WaitEnd("waiting");
  EXPECT_EQ(finished.state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(FromProto(finished.create_time()), FromProto(waiting.create_time()));
  EXPECT_EQ(finished.settings().SerializeAsString(), waiting.settings().SerializeAsString());
  EXPECT_EQ(WaitEnd("generate").state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Get("running").SerializeAsString(), running.last_job().SerializeAsString());
}

TEST_F(JobsTest, MoreQueuedJobsThanTheQueueNowHoldsAreKeptAfterARestart) {
  harness_.options().supervisor.worker_arguments = {"--load-hold=" + harness_.Path("loaded")};
  Start();
  for (int i = 0; i < 4; ++i) Submit("x", absl::StrCat(i));
  harness_.options().scheduler.max_waiting = 1;
  Restart();
  harness_.Touch("loaded");
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(WaitEnd(absl::StrCat(i)).state(), v1::JOB_STATE_SUCCEEDED);
  }
}

TEST_F(JobsTest, ASecondServerOnTheSameDataIsRefused) {
  Start();
  FrontendOptions options = harness_.options();
  options.listen = "unix:" + harness_.Path("other.sock");
  const auto second = Frontend::Start(options, NewTestCard());
  EXPECT_TRUE(absl::IsUnavailable(second.status())) << second.status();
  EXPECT_THAT(second.status().message(), HasSubstr("in use by another dlo-serve"));
  Submit("x", "a");
  EXPECT_EQ(WaitEnd("a").state(), v1::JOB_STATE_SUCCEEDED);
}

}  // namespace
}  // namespace dlo
