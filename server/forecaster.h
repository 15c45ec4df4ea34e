// How long a request will take, by how long those before it took.
//
//   Forecaster forecaster({.work = [card](const JobSpec& spec) { return WorkOf(*card, ...); }});
//   v1::Forecast before = forecaster.Forecast(spec);      // no run_time: nothing has run yet
//   forecaster.Learn(spec, finished.times());
//   v1::Forecast after = forecaster.Forecast(spec);       // as long as that one took
//
// Each stage has a rate, seconds for each operation that a request's work asks of it: the median
// over the last requests of this server. A request of another shape is predicted by its operations,
// which is rough: small ones keep the cores less busy. Thread-safe.
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "dlo/v1/video_generation.pb.h"
#include "models/model_plan.h"
#include "server/request_resolution.h"

namespace dlo {

struct ForecasterOptions {
  // Without it nothing is forecast.
  std::function<absl::StatusOr<RequestWork>(const JobSpec&)> work;
  std::string transfer = "none";  // as in the configuration
  // Ranks that hold a streamed block together, each of them one part; 0: nothing is streamed.
  int sharers = 0;
};

class Forecaster {
 public:
  explicit Forecaster(ForecasterOptions options) : options_(std::move(options)) {}

  // Every field that is known; see the message.
  v1::Forecast Forecast(const JobSpec& spec) const;

  // A request took so long in its stages.
  void Learn(const JobSpec& spec, const v1::StageTimes& times);

 private:
  // Of one stage, in seconds for each operation.
  class Rate {
   public:
    void Add(double operations, absl::Duration time);
    // None before the first Add.
    std::optional<absl::Duration> Predict(double operations) const;

   private:
    std::deque<double> last_;
  };

  const ForecasterOptions options_;

  mutable absl::Mutex mutex_;
  Rate text_ ABSL_GUARDED_BY(mutex_);
  Rate denoise_ ABSL_GUARDED_BY(mutex_);
  Rate decode_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dlo
