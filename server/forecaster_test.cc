#include "server/forecaster.h"

#include <gtest/gtest.h>

#include "proto/convert.h"

namespace dlo {
namespace {

// A request of `steps` steps asks for so many operations of each stage; "none" has no plan.
absl::StatusOr<RequestWork> TestWork(const JobSpec& spec) {
  if (spec.prompt == "none") return absl::UnimplementedError("no plan");
  RequestWork work{.plan = VisitPlan({3, 5})};
  work.plan.Add(0, 2);
  work.plan.Add(1, spec.settings.num_inference_steps);
  work.rings = {{"text_encoder", BlockLayout::Of({TensorSpec{.shape = {128}}})},
                {"transformer", BlockLayout::Of({TensorSpec{.shape = {512}}})}};
  work.text_flops = 10;
  work.denoise_flops = 1e15 * spec.settings.num_inference_steps;
  work.decode_flops = 100;
  return work;
}

JobSpec Spec(int steps, const std::string& prompt = "x") {
  JobSpec spec{.id = "id", .prompt = prompt};
  spec.settings.num_inference_steps = steps;
  return spec;
}

v1::StageTimes Times(absl::Duration text, absl::Duration denoise, absl::Duration decode,
                     absl::Duration encode_tail) {
  v1::StageTimes times;
  *times.mutable_text() = ToProto(text);
  *times.mutable_denoise() = ToProto(denoise);
  *times.mutable_decode() = ToProto(decode);
  *times.mutable_encode_tail() = ToProto(encode_tail);
  return times;
}

absl::Duration RunTime(const Forecaster& forecaster, const JobSpec& spec) {
  return FromProto(forecaster.Forecast(spec).run_time());
}

TEST(ForecasterTest, BeforeTheFirstRequestThePlanIsKnownAndTheTimeIsNot) {
  const Forecaster forecaster({.work = TestWork, .transfer = "allgather", .sharers = 3});
  const v1::Forecast forecast = forecaster.Forecast(Spec(4));
  EXPECT_FALSE(forecast.has_run_time());
  EXPECT_FALSE(forecast.has_times());
  EXPECT_EQ(forecast.transfer(), "allgather");
  EXPECT_EQ(forecast.plan_digest(), "3,5:0x2,1x4");
  ASSERT_EQ(forecast.plan_size(), 2);
  EXPECT_EQ(forecast.plan(1).component(), "transformer");
  EXPECT_EQ(forecast.plan(1).num_blocks(), 5);
  EXPECT_EQ(forecast.plan(1).passes(), 4);
  // A third of a block, padded: 171 bytes to 256, 683 to 768.
  EXPECT_EQ(forecast.bus_bytes(), 2 * 3 * 256 + 4 * 5 * 768);
  EXPECT_EQ(forecast.denoise_flops(), 4e15);
}

TEST(ForecasterTest, ARequestTakesAsLongAsItsOperationsAtTheRateOfTheLastOne) {
  Forecaster forecaster({.work = TestWork});
  forecaster.Learn(Spec(4),
                   Times(absl::Seconds(1), absl::Seconds(40), absl::Seconds(5), absl::Seconds(1)));
  const v1::Forecast forecast = forecaster.Forecast(Spec(8));
  EXPECT_EQ(FromProto(forecast.times().text()), absl::Seconds(1));
  EXPECT_EQ(FromProto(forecast.times().denoise()), absl::Seconds(80));
  EXPECT_EQ(FromProto(forecast.times().decode()), absl::Seconds(6));
  EXPECT_EQ(FromProto(forecast.run_time()), absl::Seconds(87));
  EXPECT_EQ(forecast.bus_bytes(), 0);
}

TEST(ForecasterTest, OneSlowRequestDoesNotSpoilTheForecastAndALastingChangeIsFollowed) {
  Forecaster forecaster({.work = TestWork});
  const auto learn = [&](absl::Duration denoise) {
    forecaster.Learn(Spec(1), Times(absl::Seconds(1), denoise, absl::Seconds(1), {}));
  };
  for (int i = 0; i < 5; ++i) learn(absl::Seconds(8));
  learn(absl::Hours(1));
  EXPECT_EQ(RunTime(forecaster, Spec(1)), absl::Seconds(10));
  for (int i = 0; i < 8; ++i) learn(absl::Seconds(18));
  EXPECT_EQ(RunTime(forecaster, Spec(1)), absl::Seconds(20));
}

TEST(ForecasterTest, WhatHasNoPlanAndWhatTookNoTimeTeachNothing) {
  Forecaster forecaster({.work = TestWork});
  forecaster.Learn(Spec(1, "none"),
                   Times(absl::Seconds(1), absl::Seconds(1), absl::Seconds(1), {}));
  forecaster.Learn(Spec(1), v1::StageTimes());
  EXPECT_FALSE(forecaster.Forecast(Spec(1)).has_run_time());
  EXPECT_EQ(forecaster.Forecast(Spec(1, "none")).plan_digest(), "");
  EXPECT_FALSE(Forecaster({}).Forecast(Spec(1)).has_run_time());
}

}  // namespace
}  // namespace dlo
