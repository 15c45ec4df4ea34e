#include "server/testing/scripted_pipeline.h"

#include <signal.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
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
    const int num_steps = request.settings.num_inference_steps;
    for (int step = 1; step <= num_steps; ++step) {
      if (observer.cancelled()) return absl::CancelledError("cancelled");
      absl::SleepFor(absl::Milliseconds(Number(words, "steps_ms", 0)));
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

 private:
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
};

}  // namespace

std::unique_ptr<VideoPipeline> NewScriptedPipeline() {
  return std::make_unique<ScriptedPipeline>();
}

}  // namespace dlo
