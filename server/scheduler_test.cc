// What needs no process: several ranks, replies that belong to nothing. The rest is in
// frontend_test.cc.
#include "server/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace dlo {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(20);

class FakeLinks : public RankLinks {
 public:
  explicit FakeLinks(int num_ranks) {
    for (int i = 0; i < num_ranks; ++i) {
      queues_.push_back(std::make_shared<ResultQueue>(ResultQueue::Limits{}));
    }
  }

  void Send(int rank, v1::ToWorker message) override {
    absl::MutexLock lock(&mutex_);
    sent_.push_back(absl::StrCat(
        rank, message.has_cancel() ? " cancel " : " assign ",
        message.has_cancel() ? message.cancel().wave_id() : message.assignment().wave_id()));
  }
  std::shared_ptr<ResultQueue> result_queue(int rank) override { return queues_[rank]; }

  // What was sent, once there are `count` messages.
  std::vector<std::string> WaitSent(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto enough = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return sent_.size() >= count; };
    mutex_.AwaitWithTimeout(absl::Condition(&enough), kTimeout);
    return sent_;
  }

 private:
  std::vector<std::shared_ptr<ResultQueue>> queues_;
  absl::Mutex mutex_;
  std::vector<std::string> sent_ ABSL_GUARDED_BY(mutex_);
};

class FakeListener : public JobListener {
 public:
  void OnEvent(v1::GenerateEvent event) override {
    absl::MutexLock lock(&mutex_);
    if (event.has_job()) states_.push_back(event.job().state());
  }
  void OnStarted(ResultSource source) override {}
  void OnResult() override {}
  void OnEnd(grpc::Status status) override {
    absl::MutexLock lock(&mutex_);
    ended_ = true;
    status_ = std::move(status);
  }

  grpc::Status WaitEnd() {
    absl::MutexLock lock(&mutex_);
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&ended_), kTimeout));
    return status_;
  }
  std::vector<v1::JobState> states() {
    absl::MutexLock lock(&mutex_);
    return states_;
  }

 private:
  absl::Mutex mutex_;
  std::vector<v1::JobState> states_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
};

struct TestJob {
  explicit TestJob(std::string id) {
    JobSpec spec;
    spec.id = std::move(id);
    job = std::make_shared<Job>(std::move(spec), listener);
  }
  std::shared_ptr<FakeListener> listener = std::make_shared<FakeListener>();
  std::shared_ptr<Job> job;
};

TEST(SchedulerTest, EveryIdleRankTakesTheNextJobAndALossEndsOnlyItsOwn) {
  FakeLinks links(2);
  Scheduler scheduler({.num_ranks = 2}, &links);
  TestJob a("a"), b("b"), c("c");
  for (const TestJob* job : {&a, &b, &c}) scheduler.Submit(job->job);
  scheduler.OnRankReady(0);
  scheduler.OnRankReady(1);
  EXPECT_THAT(links.WaitSent(2), testing::ElementsAre("0 assign 1", "1 assign 2"));
  scheduler.OnRankLost(0, {.cause = "was killed by signal 9 (Killed)", .signal = 9});
  EXPECT_EQ(a.listener->WaitEnd().error_code(), grpc::StatusCode::UNAVAILABLE);
  scheduler.OnFinished(1, 2);
  EXPECT_EQ(links.WaitSent(3).back(), "1 assign 3");
  for (const TestJob* job : {&a, &b, &c}) scheduler.Release(job->job);
  EXPECT_TRUE(scheduler.WaitIdle(absl::Now() + kTimeout));
}

TEST(SchedulerTest, RepliesWithAnotherWavesIdChangeNothing) {
  FakeLinks links(1);
  Scheduler scheduler({.num_ranks = 1}, &links);
  TestJob a("a"), b("b");
  scheduler.OnRankReady(0);
  scheduler.Submit(a.job);
  scheduler.Submit(b.job);
  EXPECT_THAT(links.WaitSent(1), testing::ElementsAre("0 assign 1"));
  scheduler.OnFinished(0, 77);
  v1::WaveFailed failed;
  failed.set_wave_id(78);
  scheduler.OnFailed(0, failed);
  v1::WaveProgress progress;
  progress.set_wave_id(79);
  progress.set_stage(v1::JOB_STATE_DENOISING);
  scheduler.OnProgress(0, progress);
  progress.set_wave_id(1);
  progress.set_stage(v1::JOB_STATE_DECODING);
  scheduler.OnProgress(0, progress);
  scheduler.OnFinished(0, 1);
  EXPECT_THAT(links.WaitSent(2), testing::ElementsAre("0 assign 1", "0 assign 2"));
  EXPECT_THAT(a.listener->states(),
              testing::ElementsAre(v1::JOB_STATE_QUEUED, v1::JOB_STATE_DECODING));
}

TEST(SchedulerTest, ACancelledWaveKeepsItsRankBusyUntilItIsAnswered) {
  FakeLinks links(1);
  Scheduler scheduler({.num_ranks = 1}, &links);
  TestJob a("a"), b("b");
  scheduler.OnRankReady(0);
  scheduler.Submit(a.job);
  scheduler.Release(a.job);
  scheduler.Submit(b.job);
  EXPECT_THAT(links.WaitSent(2), testing::ElementsAre("0 assign 1", "0 cancel 1"));
  v1::WaveFailed cancelled;
  cancelled.set_wave_id(1);
  cancelled.set_code(grpc::StatusCode::CANCELLED);
  scheduler.OnFailed(0, cancelled);
  EXPECT_EQ(links.WaitSent(3).back(), "0 assign 2");
}

TEST(SchedulerTest, DrainingEndsWhatWaitsRefusesWhatComesAndIsIdleWhenTheRunningJobIsReleased) {
  FakeLinks links(1);
  Scheduler scheduler({.num_ranks = 1}, &links);
  TestJob running("a"), waiting("b"), late("c");
  scheduler.OnRankReady(0);
  scheduler.Submit(running.job);
  scheduler.Submit(waiting.job);
  scheduler.Drain();
  EXPECT_EQ(waiting.listener->WaitEnd().error_code(), grpc::StatusCode::UNAVAILABLE);
  scheduler.Submit(late.job);
  EXPECT_EQ(late.listener->WaitEnd().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_FALSE(scheduler.WaitIdle(absl::Now() + absl::Milliseconds(20)));
  scheduler.Release(running.job);
  EXPECT_TRUE(scheduler.WaitIdle(absl::Now() + kTimeout));
}

TEST(SchedulerTest, AnIdIsFreeAgainAsSoonAsItsJobHasEnded) {
  FakeLinks links(1);
  Scheduler scheduler({.num_ranks = 1}, &links);
  TestJob first("same"), second("same"), third("same");
  scheduler.OnRankReady(0);
  scheduler.Submit(first.job);
  scheduler.Submit(second.job);
  EXPECT_EQ(second.listener->WaitEnd().error_code(), grpc::StatusCode::ALREADY_EXISTS);
  scheduler.OnRankLost(0, {.cause = "exited with code 1"});
  scheduler.OnRankReady(0);
  EXPECT_EQ(first.listener->WaitEnd().error_code(), grpc::StatusCode::UNAVAILABLE);
  scheduler.Submit(third.job);
  // The first two are released late, as by calls that still have to say goodbye.
  scheduler.Release(first.job);
  scheduler.Release(second.job);
  EXPECT_THAT(links.WaitSent(2), testing::ElementsAre("0 assign 1", "0 assign 2"));
  EXPECT_FALSE(scheduler.WaitIdle(absl::Now() + absl::Milliseconds(20)));
}

}  // namespace
}  // namespace dlo
