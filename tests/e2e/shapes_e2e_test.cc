// The real programs on the demo model: dlo-serve and its worker, requests by dlo-client, files
// decoded again.
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/safetensors.h"
#include "media/video_reader.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/child_process.h"
#include "tests/e2e/shape_measure.h"

namespace dlo {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kStartTimeout = absl::Seconds(30);
constexpr absl::Duration kRequestTimeout = absl::Seconds(120);
const std::filesystem::path kShapes = std::filesystem::path(DLO_SOURCE_DIR) / "assets/shapes";

std::string Binary(const std::string& name) { return absl::StrCat(DLO_BINARY_DIR, "/bin/", name); }

struct ProgramResult {
  int exit_code = -1;
  std::string output;
};

ProgramResult Run(const std::vector<std::string>& argv) {
  auto process = ChildProcess::Start(argv);
  if (!process.ok()) return {.output = process.status().ToString()};
  absl::StatusOr<int> code = (*process)->Wait(kRequestTimeout);
  if (!code.ok()) return {.output = code.status().ToString()};
  return {.exit_code = *code, .output = (*process)->output()};
}

// One dlo-serve for all tests of this file, in a folder of its own.
class ServeEnvironment : public testing::Environment {
 public:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "dlo-e2e-XXXXXX").native();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    auto serve = ChildProcess::Start(
        {Binary("dlo-serve"), "--config", absl::StrCat(DLO_SOURCE_DIR, "/configs/shapes.yaml"),
         "--listen", "127.0.0.1:0", "--data-dir", (folder_ / "data").native()});
    ASSERT_TRUE(serve.ok()) << serve.status();
    serve_ = *std::move(serve);
    absl::StatusOr<std::string> line = serve_->WaitForLine("serving on ", kStartTimeout);
    ASSERT_TRUE(line.ok()) << line.status();
    const std::vector<std::string> parts = absl::StrSplit(*line, "serving on ");
    endpoint_ = std::string(absl::StripSuffix(*absl::StrSplit(parts.back(), ' ').begin(), ","));
    const ProgramResult status =
        Run({Binary("dlo-client"), "status", "--endpoint", endpoint_, "--wait", "30s"});
    ASSERT_EQ(status.exit_code, 0) << status.output << serve_->output();
    ASSERT_THAT(status.output, HasSubstr("SERVING"));
  }
  void TearDown() override {
    if (serve_ != nullptr) {
      serve_->Signal(SIGTERM);
      absl::StatusOr<int> code = serve_->Wait(kStartTimeout);
      ASSERT_TRUE(code.ok()) << code.status();
      EXPECT_EQ(*code, 0) << serve_->output();
    }
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  std::filesystem::path folder() const { return folder_; }

  ProgramResult Generate(const std::vector<std::string>& arguments) const {
    std::vector<std::string> argv = {Binary("dlo-client"), "generate", "--endpoint", endpoint_};
    argv.insert(argv.end(), arguments.begin(), arguments.end());
    return Run(argv);
  }

 private:
  std::filesystem::path folder_;
  std::unique_ptr<ChildProcess> serve_;
  std::string endpoint_;
};

ServeEnvironment* const serving =
    static_cast<ServeEnvironment*>(testing::AddGlobalTestEnvironment(new ServeEnvironment));

// What diffusers' own video of the prompt shows (tools/check_shapes_prompts.py).
struct PromptCase {
  std::string prompt;
  int seed = 0;
  std::string color;
  std::string background;
  std::string motion;
};

void PrintTo(const PromptCase& c, std::ostream* out) { *out << c.prompt; }

std::vector<PromptCase> PromptCases() {
  std::ifstream file(absl::StrCat(DLO_SOURCE_DIR, "/tests/e2e/shapes_prompts.json"));
  std::vector<PromptCase> cases;
  for (const auto& c : nlohmann::json::parse(file)) {
    cases.push_back({c["prompt"], c["seed"], c["color"], c["background"], c["motion"]});
  }
  return cases;
}

class ShapesVideo : public testing::TestWithParam<PromptCase> {};

TEST_P(ShapesVideo, ShowsWhatThePromptSays) {
  const PromptCase& c = GetParam();
  const std::filesystem::path path = serving->folder() / absl::StrCat(c.seed, ".mp4");
  const ProgramResult client = serving->Generate(
      {"--prompt", c.prompt, "--seed", absl::StrCat(c.seed), "--output", path.native()});
  ASSERT_EQ(client.exit_code, 0) << client.output;
  EXPECT_THAT(client.output, HasSubstr(path.native()));

  absl::StatusOr<DecodedVideo> video = ReadVideo(path);
  ASSERT_TRUE(video.ok()) << video.status();
  EXPECT_EQ(video->info.codec, "h264");
  EXPECT_EQ(video->info.pix_fmt, "yuv420p");
  EXPECT_TRUE(video->info.faststart);
  EXPECT_EQ(video->info.fps(), 8);
  ASSERT_EQ(video->info.num_frames, 17);
  ASSERT_EQ(video->info.height, 128);
  ASSERT_EQ(video->info.width, 128);

  const ShapeMeasure seen = MeasureShape(video->rgb, 17, 128, 128);
  EXPECT_EQ(seen.color, c.color);
  EXPECT_EQ(seen.background, c.background);
  EXPECT_EQ(seen.motion, c.motion)
      << "dx " << seen.dx << " dy " << seen.dy << " growth " << seen.growth;
}

INSTANTIATE_TEST_SUITE_P(Prompts, ShapesVideo, testing::ValuesIn(PromptCases()));

std::vector<float> ReadFloats(const std::filesystem::path& path, const std::string& name,
                              std::vector<int64_t>* shape) {
  absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path);
  EXPECT_TRUE(file.ok()) << file.status();
  if (!file.ok() || !file->tensors().contains(name)) return {};
  const SafetensorsEntry& entry = file->tensors().at(name);
  EXPECT_EQ(entry.dtype, DType::kF32);
  *shape = entry.shape;
  std::vector<float> values(static_cast<size_t>(entry.bytes) / sizeof(float));
  std::memcpy(values.data(), file->data(entry).data(), values.size() * sizeof(float));
  return values;
}

// golden.safetensors holds diffusers' frames of this very request in float32. Twenty steps through
// all of the program agree to the pipelines' tolerance.
TEST(ShapesRequest, LosslessFramesEqualThoseOfDiffusers) {
  const std::filesystem::path path = serving->folder() / "frames.safetensors";
  const ProgramResult client =
      serving->Generate({"--prompt", "a red circle moving right on a black background", "--seed",
                         "0", "--output", path.native()});
  ASSERT_EQ(client.exit_code, 0) << client.output;
  std::vector<int64_t> shape, golden_shape;
  const std::vector<float> frames = ReadFloats(path, "video", &shape);
  const std::vector<float> golden =
      ReadFloats(kShapes / "golden.safetensors", "frames", &golden_shape);
  ASSERT_EQ(shape, (std::vector<int64_t>{17, 128, 128, 3}));
  ASSERT_EQ(golden_shape, (std::vector<int64_t>{1, 17, 128, 128, 3}));
  ASSERT_EQ(frames.size(), golden.size());
  float worst = 0;
  for (size_t i = 0; i < frames.size(); ++i)
    worst = std::max(worst, std::abs(frames[i] - golden[i]));
  EXPECT_LE(worst, 1e-3f);
}

TEST(ShapesRequest, MakesAPngContactSheet) {
  const std::filesystem::path path = serving->folder() / "sheet.png";
  const ProgramResult client = serving->Generate(
      {"--prompt", "a red circle", "--seed", "0", "--steps", "1", "--output", path.native()});
  ASSERT_EQ(client.exit_code, 0) << client.output;
  std::ifstream file(path, std::ios::binary);
  char magic[8] = {};
  file.read(magic, sizeof(magic));
  EXPECT_EQ(std::string(magic, sizeof(magic)), "\x89PNG\r\n\x1a\n");
}

TEST(ShapesRequest, AWrongFieldEndsTheClientWithOneLineAndNoFile) {
  const std::filesystem::path path = serving->folder() / "refused.mp4";
  const ProgramResult client =
      serving->Generate({"--prompt", "a red circle", "--height", "130", "--output", path.native()});
  EXPECT_EQ(client.exit_code, 1);
  EXPECT_THAT(client.output, HasSubstr("height"));
  EXPECT_THAT(client.output, HasSubstr("130"));
  EXPECT_EQ(std::count(client.output.begin(), client.output.end(), '\n'), 1) << client.output;
  EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace dlo
