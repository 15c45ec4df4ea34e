// For tests of Wan's pipeline: models of this source tree, a small request, and an observer that
// keeps what a generation reports.
#pragma once

#include <ATen/ATen.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "models/model_card.h"
#include "models/video_pipeline.h"

namespace dlo {

class Recorder : public GenerationObserver {
 public:
  void OnStage(Stage stage) override { stages.push_back(stage); }
  void OnStep(int step, int num_steps) override {
    steps.push_back(step);
    if (cancel_after_step && step >= *cancel_after_step) cancel = true;
  }
  absl::Status OnFrames(const FrameSpan& span) override {
    chunks.push_back(at::tensor(span.rgb).view({span.num_frames, span.height, span.width, 3}));
    return frames_status;
  }
  bool cancelled() const override { return cancel; }

  at::Tensor video() const { return at::cat(chunks); }  // [F, H, W, 3]

  std::vector<Stage> stages;
  std::vector<int> steps;
  std::vector<at::Tensor> chunks;
  absl::Status frames_status;
  std::optional<int> cancel_after_step;
  bool cancel = false;
};

inline std::filesystem::path GoldenDir() {
  return std::filesystem::path(DLO_SOURCE_DIR) / "tests/goldens/pipelines";
}

// "shapes" or one of the goldens' models.
inline std::filesystem::path RepositoryOf(const std::string& name) {
  return name == "shapes" ? std::filesystem::path(DLO_SOURCE_DIR) / "assets/shapes"
                          : GoldenDir() / name / "repo";
}

// Four steps of five frames of 64x64.
inline VideoRequest SmallRequest(const std::filesystem::path& root) {
  auto card = ReadModelCard(root);
  EXPECT_TRUE(card.ok()) << card.status();
  VideoRequest request = {"a yellow star moving down", "blurred", {}};
  EXPECT_TRUE((*card)
                  ->Resolve({.width = 64, .height = 64, .num_frames = 5, .num_inference_steps = 4},
                            /*random_seed=*/3, &request.settings)
                  .empty());
  return request;
}

}  // namespace dlo
