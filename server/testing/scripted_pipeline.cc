#include "server/testing/scripted_pipeline.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"

namespace dlo {
namespace {

// The number behind `name=` in the prompt, or `fallback`.
int Number(const std::vector<std::string>& words, const std::string& name, int fallback) {
  for (absl::string_view word : words) {
    int value = 0;
    if (absl::ConsumePrefix(&word, name + "=") && absl::SimpleAtoi(word, &value)) return value;
  }
  return fallback;
}

bool Has(const std::vector<std::string>& words, const std::string& name) {
  return std::find(words.begin(), words.end(), name) != words.end();
}

class ScriptedPipeline : public VideoPipeline {
 public:
  explicit ScriptedPipeline(FlightRecorder* recorder)
      : recorder_(*recorder), group_(recorder->AddGroup("weights/0")) {}

  absl::StatusOr<GenerationStats> Generate(const VideoRequest& request,
                                           GenerationObserver& observer) override {
    const std::vector<std::string> words = absl::StrSplit(request.prompt, ' ');
    GenerationStats stats;
    absl::Time start = absl::Now();
    observer.OnStage(Stage::kEncodingText);
    RETURN_IF_ERROR(Hold(words, "hold_text:", observer));
    stats.text = absl::Now() - start;

    start = absl::Now();
    observer.OnStage(Stage::kDenoising);
    int visit = 0;
    visits_ = 0;
    const int num_steps = request.settings.num_inference_steps;
    for (int step = 1; step <= num_steps; ++step) {
      if (observer.cancelled()) return absl::CancelledError("cancelled");
      absl::SleepFor(absl::Milliseconds(Number(words, "steps_ms", 0)));
      for (int i = Number(words, "visits", 0); i > 0; --i) {
        RETURN_IF_ERROR(Visit(words, ++visit, observer));
      }
      observer.OnStep(step, num_steps);
      if (step == 1) RETURN_IF_ERROR(Misbehave(words));
      RETURN_IF_ERROR(Hold(words, "hold_step=" + std::to_string(step) + ":", observer));
    }
    stats.denoise = absl::Now() - start;

    start = absl::Now();
    observer.OnStage(Stage::kDecoding);
    RETURN_IF_ERROR(Hold(words, "hold_decode:", observer));
    const VideoSettings& settings = request.settings;
    std::vector<float> frame(size_t{3} * settings.width * settings.height);
    for (int i = 0; i < settings.num_frames; ++i) {
      if (observer.cancelled()) return absl::CancelledError("cancelled");
      for (size_t j = 0; j < frame.size(); ++j) {
        frame[j] = static_cast<float>((j + i + settings.seed) % 256) / 255.0f;
      }
      if (Has(words, "nan")) frame[0] = std::numeric_limits<float>::quiet_NaN();
      RETURN_IF_ERROR(observer.OnFrames({frame, 1, settings.height, settings.width}));
    }
    stats.decode = absl::Now() - start;
    stats.device_bytes_peak_denoise = 1 << 20;
    stats.bus_bytes = 1000;
    if (Has(words, "streams")) {
      stats.bus_bytes = 3 << 20;
      stats.streaming = {{Stage::kDenoising,
                          {.visits = 40,
                           .bus_bytes = 3 << 20,
                           .fabric_bytes = 9 << 20,
                           .copy_time = absl::Milliseconds(800),
                           .gather_time = absl::Milliseconds(500),
                           .copy_stall = absl::Milliseconds(150),
                           .gather_stall = absl::Milliseconds(50)}}};
    }
    if (request.trace) stats.timeline = "{\"traceEvents\":[]}\n";
    return stats;
  }

  PipelineMemory memory() const override {
    return {.used_bytes = 900, .peak_bytes = 1 << 20, .weights_bytes = 600, .pinned_bytes = 50};
  }

  int64_t visits() const override { return visits_; }

 private:
  absl::Status Visit(const std::vector<std::string>& words, int visit,
                     const GenerationObserver& observer) {
    const FlightToken gather =
        recorder_.Begin(FlightOp::kAllGather, group_, static_cast<uint64_t>(++gathers_));
    RETURN_IF_ERROR(HoldAndTell(words, "hold_gather=" + std::to_string(visit) + ":", observer));
    recorder_.End(gather, true);
    recorder_.SetVisit(visit);
    const FlightScope scope(&recorder_, FlightOp::kVisit);
    absl::SleepFor(absl::Milliseconds(Number(words, "visit_ms", 0)));
    RETURN_IF_ERROR(HoldAndTell(words, "hold_visit=" + std::to_string(visit) + ":", observer));
    visits_ = visit;
    return absl::OkStatus();
  }

  static absl::Status HoldAndTell(const std::vector<std::string>& words, const std::string& prefix,
                                  const GenerationObserver& observer) {
    for (absl::string_view path : words) {
      if (absl::ConsumePrefix(&path, prefix)) std::ofstream(std::string(path) + ".held").flush();
    }
    return Hold(words, prefix, observer);
  }

  static absl::Status Misbehave(const std::vector<std::string>& words) {
    if (const int number = Number(words, "signal", 0); number != 0) raise(number);
    if (const int code = Number(words, "exit", 0); code != 0) _exit(code);
    if (Has(words, "throw")) throw std::bad_alloc();
    if (Has(words, "oom")) return absl::ResourceExhaustedError("no memory for the attention");
    if (Has(words, "fail")) return absl::InternalError("a kernel failed");
    return absl::OkStatus();
  }

  static absl::Status Hold(const std::vector<std::string>& words, const std::string& prefix,
                           const GenerationObserver& observer) {
    for (absl::string_view path : words) {
      if (!absl::ConsumePrefix(&path, prefix)) continue;
      while (!std::filesystem::exists(std::string(path))) {
        if (observer.cancelled()) return absl::CancelledError("cancelled");
        absl::SleepFor(absl::Milliseconds(2));
      }
    }
    return absl::OkStatus();
  }

  FlightRecorder& recorder_;
  const int group_;
  int64_t gathers_ = 0;
  std::atomic<int64_t> visits_ = 0;
};

}  // namespace

std::unique_ptr<VideoPipeline> NewScriptedPipeline(FlightRecorder* recorder) {
  return std::make_unique<ScriptedPipeline>(recorder);
}

}  // namespace dlo
