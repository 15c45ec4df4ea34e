// What needs no process: several ranks, replies that belong to nothing. The rest is in
// frontend_test.cc.
#include "server/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
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
    if (message.has_cancel()) {
      sent_.push_back(absl::StrCat(rank, " cancel ", message.cancel().wave_id()));
    } else {
      const v1::Assignment& assignment = message.assignment();
      sent_.push_back(
          absl::StrCat(rank, assignment.has_walk() ? " walk " : " assign ", assignment.wave_id(),
                       assignment.has_walk() ? "" : " " + assignment.request().job_id()));
    }
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
  bool ended() {
    absl::MutexLock lock(&mutex_);
    return ended_;
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
  explicit TestJob(std::string id, int width = 16) {
    JobSpec spec;
    spec.id = std::move(id);
    spec.settings.width = width;
    job = std::make_shared<Job>(std::move(spec), listener);
  }
  std::shared_ptr<FakeListener> listener = std::make_shared<FakeListener>();
  std::shared_ptr<Job> job;
};

TEST(SchedulerTest, EveryIdleRankTakesTheNextJobAndALossEndsOnlyItsOwn) {
  FakeLinks links(2);
  Scheduler scheduler({.domains = IndependentReplicas(2)}, &links);
  TestJob a("a"), b("b"), c("c");
  for (const TestJob* job : {&a, &b, &c}) scheduler.Submit(job->job);
  scheduler.OnDomainReady(0);
  scheduler.OnDomainReady(1);
  EXPECT_THAT(links.WaitSent(2), testing::ElementsAre("0 assign 1 a", "1 assign 2 b"));
  scheduler.OnDomainLost(0, {.rank = 0, .cause = "was killed by signal 9 (Killed)", .signal = 9});
  EXPECT_EQ(a.listener->WaitEnd().error_code(), grpc::StatusCode::UNAVAILABLE);
  scheduler.OnFinished(1, 2);
  EXPECT_EQ(links.WaitSent(3).back(), "1 assign 3 c");
  for (const TestJob* job : {&a, &b, &c}) scheduler.Release(job->job);
  EXPECT_TRUE(scheduler.WaitIdle(absl::Now() + kTimeout));
}

TEST(SchedulerTest, RepliesWithAnotherWavesIdChangeNothing) {
  FakeLinks links(1);
  Scheduler scheduler({}, &links);
  TestJob a("a"), b("b");
  scheduler.OnDomainReady(0);
  scheduler.Submit(a.job);
  scheduler.Submit(b.job);
  EXPECT_THAT(links.WaitSent(1), testing::ElementsAre("0 assign 1 a"));
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
  EXPECT_THAT(links.WaitSent(2), testing::ElementsAre("0 assign 1 a", "0 assign 2 b"));
  EXPECT_EQ(scheduler.late_replies(), 3);
  EXPECT_THAT(
      a.listener->states(),
      testing::ElementsAre(v1::JOB_STATE_QUEUED, v1::JOB_STATE_ADMITTED, v1::JOB_STATE_DECODING));
}

TEST(SchedulerTest, ACancelledWaveKeepsItsRankBusyUntilItIsAnswered) {
  FakeLinks links(1);
  Scheduler scheduler({}, &links);
  TestJob a("a"), b("b");
  scheduler.OnDomainReady(0);
  scheduler.Submit(a.job);
  scheduler.Release(a.job);
  scheduler.Submit(b.job);
  EXPECT_THAT(links.WaitSent(2), testing::ElementsAre("0 assign 1 a", "0 cancel 1"));
  v1::WaveFailed cancelled;
  cancelled.set_wave_id(1);
  cancelled.set_code(grpc::StatusCode::CANCELLED);
  scheduler.OnFailed(0, cancelled);
  EXPECT_EQ(links.WaitSent(3).back(), "0 assign 2 b");
}

TEST(SchedulerTest, DrainingEndsWhatWaitsRefusesWhatComesAndIsIdleWhenTheRunningJobIsReleased) {
  FakeLinks links(1);
  Scheduler scheduler({}, &links);
  TestJob running("a"), waiting("b"), late("c");
  scheduler.OnDomainReady(0);
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
  Scheduler scheduler({}, &links);
  TestJob first("same"), second("same"), third("same");
  scheduler.OnDomainReady(0);
  scheduler.Submit(first.job);
  scheduler.Submit(second.job);
  EXPECT_EQ(second.listener->WaitEnd().error_code(), grpc::StatusCode::ALREADY_EXISTS);
  scheduler.OnDomainLost(0, {.rank = 0, .cause = "exited with code 1"});
  scheduler.OnDomainReady(0);
  EXPECT_EQ(first.listener->WaitEnd().error_code(), grpc::StatusCode::UNAVAILABLE);
  scheduler.Submit(third.job);
  // The first two are released late, as by calls that still have to say goodbye.
  scheduler.Release(first.job);
  scheduler.Release(second.job);
  EXPECT_THAT(links.WaitSent(2), testing::ElementsAre("0 assign 1 same", "0 assign 2 same"));
  EXPECT_FALSE(scheduler.WaitIdle(absl::Now() + absl::Milliseconds(20)));
}

SchedulerOptions Joined(int replicas) {
  return {.domains = JoinedReplicas(replicas), .max_wait = absl::ZeroDuration()};
}

v1::WaveFailed Failed(uint64_t wave, grpc::StatusCode code) {
  v1::WaveFailed failed;
  failed.set_wave_id(wave);
  failed.set_code(code);
  failed.set_reason("TEST");
  return failed;
}

TEST(SchedulerTest, AWaveHasARequestOrTheBarePlanForEachReplicaAndEndsWhenAllHaveAnswered) {
  FakeLinks links(3);
  Scheduler scheduler(Joined(3), &links);
  TestJob a("a"), b("b"), c("c");
  scheduler.Submit(a.job);
  scheduler.Submit(b.job);
  scheduler.OnDomainReady(0);
  EXPECT_THAT(links.WaitSent(3), testing::ElementsAre("0 assign 1 a", "1 assign 1 b", "2 walk 1"));
  scheduler.Submit(c.job);
  scheduler.OnFinished(2, 1);
  scheduler.OnFinished(0, 1);
  EXPECT_FALSE(scheduler.WaitIdle(absl::Now() + absl::Milliseconds(20)));
  EXPECT_EQ(links.WaitSent(3).size(), 3u);
  scheduler.OnFinished(1, 1);
  EXPECT_THAT(links.WaitSent(6), testing::Contains("0 assign 2 c"));
}

TEST(SchedulerTest, ACancelledOrFailedMemberEndsAloneAndItsNeighboursGoOn) {
  FakeLinks links(3);
  Scheduler scheduler(Joined(3), &links);
  TestJob a("a"), b("b"), c("c"), d("d");
  for (const TestJob* job : {&a, &b, &c, &d}) scheduler.Submit(job->job);
  scheduler.OnDomainReady(0);
  links.WaitSent(3);
  scheduler.Release(b.job);
  EXPECT_EQ(links.WaitSent(4).back(), "1 cancel 1");
  scheduler.OnFailed(2, Failed(1, grpc::StatusCode::RESOURCE_EXHAUSTED));
  EXPECT_EQ(c.listener->WaitEnd().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  scheduler.OnFailed(1, Failed(1, grpc::StatusCode::CANCELLED));
  v1::WaveProgress progress;
  progress.set_wave_id(1);
  progress.set_stage(v1::JOB_STATE_DENOISING);
  scheduler.OnProgress(0, progress);
  scheduler.OnFinished(0, 1);
  EXPECT_EQ(links.WaitSent(5)[4], "0 assign 2 d");
  EXPECT_THAT(
      a.listener->states(),
      testing::ElementsAre(v1::JOB_STATE_QUEUED, v1::JOB_STATE_ADMITTED, v1::JOB_STATE_DENOISING));
  EXPECT_EQ(scheduler.late_replies(), 0);
}

TEST(SchedulerTest, TheLossOfADomainEndsWhatHasNotAnsweredAndKeepsTheQueue) {
  FakeLinks links(2);
  Scheduler scheduler(Joined(2), &links);
  TestJob a("a"), b("b"), c("c");
  for (const TestJob* job : {&a, &b, &c}) scheduler.Submit(job->job);
  scheduler.OnDomainReady(0);
  links.WaitSent(2);
  scheduler.OnFinished(0, 1);
  scheduler.OnDomainLost(0, {.rank = 1, .cause = "exited with code 7", .exit_code = 7});
  const grpc::Status lost = b.listener->WaitEnd();
  EXPECT_EQ(lost.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(lost.error_message(), testing::HasSubstr("rank 1 exited with code 7"));
  // The end of a wave that is gone.
  scheduler.OnFinished(1, 1);
  scheduler.OnDomainReady(0);
  EXPECT_THAT(links.WaitSent(4), testing::Contains("0 assign 2 c"));
  EXPECT_EQ(scheduler.late_replies(), 1);
  EXPECT_FALSE(a.listener->ended());
  EXPECT_FALSE(c.listener->ended());
}

TEST(SchedulerTest, RepliesFromTheWrongReplicaOrASecondTimeAreDroppedAndCounted) {
  FakeLinks links(4);
  // Two replicas of two ranks: 0 and 2 are the primaries (reference row 164).
  SchedulerOptions options = Joined(2);
  options.domains = {DispatchDomain{{{0, 1}, {2, 3}}}};
  Scheduler scheduler(options, &links);
  TestJob a("a"), b("b");
  scheduler.Submit(a.job);
  scheduler.Submit(b.job);
  scheduler.OnDomainReady(0);
  EXPECT_THAT(links.WaitSent(4),
              testing::ElementsAre("0 assign 1 a", "1 assign 1 a", "2 assign 1 b", "3 assign 1 b"));
  scheduler.OnFinished(1, 1);
  scheduler.OnFailed(3, Failed(1, grpc::StatusCode::INTERNAL));
  scheduler.OnFinished(0, 1);
  scheduler.OnFailed(0, Failed(1, grpc::StatusCode::INTERNAL));
  EXPECT_FALSE(scheduler.WaitIdle(absl::Now() + absl::Milliseconds(20)));
  EXPECT_EQ(scheduler.late_replies(), 3);
  EXPECT_FALSE(a.listener->ended());
  EXPECT_FALSE(b.listener->ended());
  // A cancellation reaches every rank of the replica and no other.
  scheduler.Release(b.job);
  const std::vector<std::string> sent = links.WaitSent(6);
  EXPECT_THAT(std::vector<std::string>(sent.begin() + 4, sent.end()),
              testing::ElementsAre("2 cancel 1", "3 cancel 1"));
}

TEST(SchedulerTest, AWaveThatTakesManyTimesTheForecastOfItsSlowestRequestIsOverdue) {
  FakeLinks links(2);
  SchedulerOptions options = Joined(2);
  options.wave_key = [](const JobSpec&) { return "one"; };
  options.wave_limits = {.total_min = absl::ZeroDuration()};
  options.forecast = [](const JobSpec& spec) {
    return WaveForecast{.until_decoding = spec.settings.width * absl::Milliseconds(1)};
  };
  absl::Notification overdue;
  RankLoss loss;
  options.on_overdue = [&](int, RankLoss why) {
    loss = std::move(why);
    overdue.Notify();
  };
  Scheduler scheduler(options, &links);
  TestJob small("small", 1), large("large", 4);
  scheduler.Submit(small.job);
  scheduler.Submit(large.job);
  scheduler.OnDomainReady(0);
  ASSERT_TRUE(overdue.WaitForNotificationWithTimeout(kTimeout));
  EXPECT_EQ(loss.reason, kWaveDeadline);
  EXPECT_THAT(loss.cause, testing::HasSubstr("more than 5 times the predicted 4ms"));
}

TEST(SchedulerTest, IncompatibleRequestsRunInWavesOfTheirOwn) {
  FakeLinks links(2);
  Scheduler scheduler(Joined(2), &links);
  TestJob a("a"), wide("wide", 32), b("b");
  for (const TestJob* job : {&a, &wide, &b}) scheduler.Submit(job->job);
  scheduler.OnDomainReady(0);
  EXPECT_THAT(links.WaitSent(2), testing::ElementsAre("0 assign 1 a", "1 assign 1 b"));
  scheduler.OnFinished(0, 1);
  scheduler.OnFinished(1, 1);
  EXPECT_THAT(links.WaitSent(4), testing::Contains("0 assign 2 wide"));
  EXPECT_EQ(links.WaitSent(4)[3], "1 walk 2");
}

TEST(SchedulerTest, TheFirstRequestWaitsForCompanyInACollectiveDomain) {
  FakeLinks links(2);
  SchedulerOptions options = Joined(2);
  options.max_wait = absl::Seconds(60);
  Scheduler scheduler(options, &links);
  TestJob a("a"), b("b");
  scheduler.OnDomainReady(0);
  scheduler.Submit(a.job);
  EXPECT_FALSE(scheduler.WaitIdle(absl::Now() + absl::Milliseconds(30)));
  EXPECT_THAT(links.WaitSent(0), testing::IsEmpty());
  scheduler.Submit(b.job);
  EXPECT_THAT(links.WaitSent(2), testing::ElementsAre("0 assign 1 a", "1 assign 1 b"));
}

TEST(SchedulerTest, AWaveWithoutProgressCondemnsItsDomainOnceAndBlamesWhoStoppedFirst) {
  FakeLinks links(2);
  absl::Mutex mutex;
  std::vector<std::pair<int, RankLoss>> overdue;
  SchedulerOptions options = Joined(2);
  options.wave_limits.stall_timeout = absl::Milliseconds(100);
  options.on_overdue = [&](int domain, RankLoss loss) {
    absl::MutexLock lock(&mutex);
    overdue.emplace_back(domain, std::move(loss));
  };
  Scheduler scheduler(options, &links);
  TestJob a("a"), b("b"), c("c");
  for (const TestJob* job : {&a, &b, &c}) scheduler.Submit(job->job);
  scheduler.OnDomainReady(0);
  links.WaitSent(2);
  // Rank 1 works on, rank 0 is only alive.
  const auto told = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex) { return !overdue.empty(); };
  const absl::Time end = absl::Now() + kTimeout;
  for (uint64_t work = 1; absl::Now() < end; ++work) {
    v1::Heartbeat heartbeat;
    heartbeat.set_wave_id(1);
    scheduler.OnHeartbeat(0, heartbeat);
    heartbeat.set_work_done(work);
    scheduler.OnHeartbeat(1, heartbeat);
    absl::MutexLock lock(&mutex);
    if (mutex.AwaitWithTimeout(absl::Condition(&told), absl::Milliseconds(5))) break;
  }
  // It is told once, and the domain gets nothing before it was restarted.
  scheduler.OnFinished(0, 1);
  scheduler.OnFinished(1, 1);
  EXPECT_FALSE(scheduler.WaitIdle(absl::Now() + absl::Milliseconds(150)));
  EXPECT_EQ(links.WaitSent(2).size(), 2u);
  {
    absl::MutexLock lock(&mutex);
    ASSERT_EQ(overdue.size(), 1u);
    EXPECT_EQ(overdue[0].first, 0);
    EXPECT_EQ(overdue[0].second.rank, 0);
    EXPECT_EQ(overdue[0].second.reason, kWaveDeadline);
  }
  scheduler.OnDomainLost(0, {.rank = 0, .cause = "x"});
  scheduler.OnDomainReady(0);
  EXPECT_THAT(links.WaitSent(4), testing::Contains("0 assign 2 c"));
}

// The families of a registry, by "name" or "name{value of the only label}".
std::map<std::string, double> Counts(const prometheus::Registry& registry) {
  std::map<std::string, double> counts;
  for (const prometheus::MetricFamily& family : registry.Collect()) {
    for (const prometheus::ClientMetric& metric : family.metric) {
      const std::string label =
          metric.label.empty() ? "" : absl::StrCat("{", metric.label[0].value, "}");
      counts[family.name + label] = metric.counter.value + metric.gauge.value +
                                    static_cast<double>(metric.histogram.sample_count);
    }
  }
  return counts;
}

TEST(SchedulerTest, CountsQueueWavesDeferralsStepsAndLateRepliesInTheRegistryItIsGiven) {
  const auto registry = std::make_shared<prometheus::Registry>();
  FakeLinks links(2);
  SchedulerOptions options = Joined(2);
  options.max_waiting = 7;
  options.metrics = std::make_shared<ServerMetrics>(2, registry);
  Scheduler scheduler(options, &links);
  TestJob a("a"), wide("wide", 32), b("b"), c("c");
  for (const TestJob* job : {&a, &wide, &b, &c}) scheduler.Submit(job->job);
  const auto until = [&](const std::string& series, double value) {
    for (const absl::Time end = absl::Now() + kTimeout; absl::Now() < end;) {
      if (Counts(*registry)[series] == value) return true;
      absl::SleepFor(absl::Milliseconds(1));
    }
    ADD_FAILURE() << series << " is " << Counts(*registry)[series];
    return false;
  };
  EXPECT_TRUE(until("dlo_requests_waiting", 4));
  EXPECT_EQ(Counts(*registry)["dlo_requests_waiting_max"], 7);
  EXPECT_EQ(Counts(*registry)["dlo_requests_running"], 0);
  scheduler.OnDomainReady(0);
  EXPECT_TRUE(until("dlo_requests_running", 2));
  EXPECT_TRUE(until("dlo_requests_waiting", 2));
  EXPECT_EQ(Counts(*registry)["dlo_wave_requests"], 1);
  EXPECT_EQ(Counts(*registry)["dlo_wave_deferrals_total{width}"], 1);
  EXPECT_EQ(Counts(*registry)["dlo_request_queue_duration_seconds"], 2);
  v1::WaveProgress progress;
  progress.set_wave_id(1);
  progress.set_stage(v1::JOB_STATE_DENOISING);
  progress.set_num_steps(2);
  for (const int step : {0, 1, 2}) {
    progress.set_step(step);
    scheduler.OnProgress(0, progress);
  }
  EXPECT_TRUE(until("dlo_denoise_step_duration_seconds", 2));
  scheduler.OnFinished(0, 33);
  EXPECT_TRUE(until("dlo_late_replies_total", 1));
  scheduler.OnFinished(0, 1);
  EXPECT_TRUE(until("dlo_requests_running", 1));
  scheduler.OnDomainLost(0, {.rank = 1, .cause = "x"});
  EXPECT_TRUE(until("dlo_requests_running", 0));
}

// Two ranks that show no progress, the second since later. The first one's result waits for the
// disk, which is not its fault; once there is room it is.
TEST(SchedulerTest, ARankWhoseResultWaitsForTheDiskIsNotTakenForAStuckOne) {
  FakeLinks links(2);
  absl::Mutex mutex;
  std::vector<int> overdue;
  SchedulerOptions options;
  options.domains = IndependentReplicas(2);
  options.wave_limits.stall_timeout = absl::Milliseconds(50);
  options.on_overdue = [&](int domain, const RankLoss&) {
    absl::MutexLock lock(&mutex);
    overdue.push_back(domain);
  };
  const auto told = [&](size_t count) {
    absl::MutexLock lock(&mutex);
    const auto enough = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex) { return overdue.size() >= count; };
    EXPECT_TRUE(mutex.AwaitWithTimeout(absl::Condition(&enough), kTimeout));
    return overdue;
  };
  Scheduler scheduler(options, &links);
  TestJob a("a"), b("b");
  scheduler.OnDomainReady(0);
  scheduler.Submit(a.job);
  links.WaitSent(1);
  ResultQueue& queue = *links.result_queue(0);
  v1::ResultChunk chunk;
  chunk.set_data(std::string(1000, 'x'));
  while (queue.Push(1, chunk)) {
  }
  ASSERT_TRUE(queue.holds_back());
  scheduler.OnDomainReady(1);
  scheduler.Submit(b.job);
  EXPECT_THAT(told(1), testing::ElementsAre(1));
  while (queue.Pop(1)) {
  }
  EXPECT_THAT(told(2), testing::ElementsAre(1, 0));
}

}  // namespace
}  // namespace dlo
