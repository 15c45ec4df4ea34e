#include "server/forecaster.h"

#include <algorithm>
#include <vector>

#include "proto/convert.h"

namespace dlo {
namespace {

// An odd number, so that the median is one of them.
constexpr size_t kRequestsRemembered = 15;

}  // namespace

void Forecaster::Rate::Add(double operations, absl::Duration time) {
  if (operations <= 0 || time <= absl::ZeroDuration()) return;
  last_.push_back(absl::ToDoubleSeconds(time) / operations);
  if (last_.size() > kRequestsRemembered) last_.pop_front();
}

std::optional<absl::Duration> Forecaster::Rate::Predict(double operations) const {
  if (last_.empty()) return std::nullopt;
  std::vector<double> rates(last_.begin(), last_.end());
  const auto middle = rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2);
  std::nth_element(rates.begin(), middle, rates.end());
  return absl::Seconds(*middle * operations);
}

v1::Forecast Forecaster::Forecast(const JobSpec& spec) const {
  v1::Forecast forecast;
  forecast.set_transfer(options_.transfer);
  if (!options_.work) return forecast;
  const absl::StatusOr<RequestWork> work = options_.work(spec);
  if (!work.ok()) return forecast;

  forecast.set_plan_digest(work->plan.digest());
  int64_t bytes = 0;
  for (const VisitPlan::Run& run : work->plan.runs()) {
    v1::PlanRun* entry = forecast.add_plan();
    entry->set_component(work->rings[run.ring].component);
    entry->set_num_blocks(static_cast<int32_t>(work->plan.ring_sizes()[run.ring]));
    entry->set_passes(run.passes);
    if (options_.sharers > 0) {
      bytes += run.passes * work->plan.ring_sizes()[run.ring] *
               work->rings[run.ring].block.shard_bytes(options_.sharers);
    }
  }
  forecast.set_bus_bytes(bytes);
  forecast.set_text_flops(work->text_flops);
  forecast.set_denoise_flops(work->denoise_flops);
  forecast.set_decode_flops(work->decode_flops);

  absl::MutexLock lock(&mutex_);
  const auto text = text_.Predict(work->text_flops);
  const auto denoise = denoise_.Predict(work->denoise_flops);
  const auto decode = decode_.Predict(work->decode_flops);
  if (!text || !denoise || !decode) return forecast;
  *forecast.mutable_times()->mutable_text() = ToProto(*text);
  *forecast.mutable_times()->mutable_denoise() = ToProto(*denoise);
  *forecast.mutable_times()->mutable_decode() = ToProto(*decode);
  *forecast.mutable_run_time() = ToProto(*text + *denoise + *decode);
  return forecast;
}

void Forecaster::Learn(const JobSpec& spec, const v1::StageTimes& times) {
  if (!options_.work) return;
  const absl::StatusOr<RequestWork> work = options_.work(spec);
  if (!work.ok()) return;
  absl::MutexLock lock(&mutex_);
  text_.Add(work->text_flops, FromProto(times.text()));
  denoise_.Add(work->denoise_flops, FromProto(times.denoise()));
  // What is left of the encoding is waited for, too.
  decode_.Add(work->decode_flops, FromProto(times.decode()) + FromProto(times.encode_tail()));
}

}  // namespace dlo
