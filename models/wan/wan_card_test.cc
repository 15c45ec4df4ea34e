#include "models/wan/wan_card.h"

#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "models/wan/wan_test_repository.h"

namespace dlo {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

enum class Family { kWan21, kA14B, kTi2v };

// A repository of the family with room for full-size videos.
std::unique_ptr<ModelCard> MakeCard(Family family) {
  WanTestRepository repository;
  if (family == Family::kA14B) repository.MakeTwoExperts(0.875);
  if (family == Family::kTi2v) repository.MakeTi2v();
  repository.AllowFullSize();
  absl::StatusOr<std::unique_ptr<ModelCard>> card = ReadModelCard(repository.root());
  EXPECT_TRUE(card.ok()) << card.status();
  return *std::move(card);
}

VideoSettings Resolved(const ModelCard& card, const RequestedSettings& requested,
                       uint64_t random_seed = 0) {
  VideoSettings settings;
  const std::vector<FieldViolation> wrong = card.Resolve(requested, random_seed, &settings);
  for (const FieldViolation& violation : wrong) ADD_FAILURE() << violation.description;
  return settings;
}

TEST(WanCardTest, DefaultsFollowTheFamily) {
  const VideoSettings wan21 = Resolved(*MakeCard(Family::kWan21), {});
  EXPECT_EQ(wan21.width, 832);
  EXPECT_EQ(wan21.height, 480);
  EXPECT_EQ(wan21.num_frames, 81);
  EXPECT_EQ(wan21.fps, 16);
  EXPECT_EQ(wan21.num_inference_steps, 50);
  EXPECT_EQ(wan21.guidance_scale, 5);
  EXPECT_FALSE(wan21.guidance_scale_2.has_value());
  EXPECT_EQ(wan21.flow_shift, 3);
  EXPECT_EQ(wan21.solver, "unipc");

  const VideoSettings a14b = Resolved(*MakeCard(Family::kA14B), {});
  EXPECT_EQ(a14b.width, 832);
  EXPECT_EQ(a14b.num_inference_steps, 40);
  EXPECT_EQ(a14b.guidance_scale, 4);
  EXPECT_EQ(a14b.guidance_scale_2, 3);

  const VideoSettings ti2v = Resolved(*MakeCard(Family::kTi2v), {});
  EXPECT_EQ(ti2v.width, 1280);
  EXPECT_EQ(ti2v.height, 704);
  EXPECT_EQ(ti2v.num_frames, 121);
  EXPECT_EQ(ti2v.fps, 24);
  EXPECT_EQ(ti2v.num_inference_steps, 50);
  EXPECT_EQ(ti2v.flow_shift, 5);
}

TEST(WanCardTest, TheDemoModelBringsItsOwnDefaults) {
  absl::StatusOr<std::unique_ptr<ModelCard>> card = ReadModelCard(DLO_SOURCE_DIR "/assets/shapes");
  ASSERT_TRUE(card.ok()) << card.status();
  EXPECT_EQ((*card)->name(), "shapes");
  const VideoSettings settings = Resolved(**card, {});
  EXPECT_EQ(settings.width, 128);
  EXPECT_EQ(settings.height, 128);
  EXPECT_EQ(settings.num_frames, 17);
  EXPECT_EQ(settings.fps, 8);
  EXPECT_EQ(settings.num_inference_steps, 20);
  EXPECT_EQ(settings.guidance_scale, 5);
  EXPECT_EQ(settings.flow_shift, 3);
}

TEST(WanCardTest, TheEulerSchedulerIsTheDefaultSolverWhereTheRepositorySaysSo) {
  WanTestRepository repository;
  repository.AllowFullSize();
  repository.Patch("model_index.json",
                   {{"scheduler", {"diffusers", "FlowMatchEulerDiscreteScheduler"}}});
  repository.Write("scheduler/scheduler_config.json", {{"shift", 7.0}});
  const VideoSettings settings = Resolved(**ReadModelCard(repository.root()), {});
  EXPECT_EQ(settings.solver, "euler");
  EXPECT_EQ(settings.flow_shift, 7);
}

TEST(WanCardTest, FramesAreRoundedAsDiffusersDoes) {
  const std::unique_ptr<ModelCard> card = MakeCard(Family::kWan21);
  const std::vector<std::pair<int64_t, int>> cases = {
      {1, 1}, {2, 1},   {3, 1},   {4, 5},   {5, 5},   {6, 5},  {7, 5},
      {8, 9}, {12, 13}, {79, 77}, {80, 81}, {81, 81}, {82, 81}};
  for (const auto& [asked, frames] : cases) {
    EXPECT_EQ(Resolved(*card, {.num_frames = asked}).num_frames, frames) << asked;
  }
}

TEST(WanCardTest, SizesAreFlooredToThePatch) {
  const VideoSettings wan21 = Resolved(*MakeCard(Family::kWan21), {.width = 80, .height = 48});
  EXPECT_EQ(wan21.width, 80);
  EXPECT_EQ(wan21.height, 48);
  const VideoSettings ti2v = Resolved(*MakeCard(Family::kTi2v), {.width = 80, .height = 48});
  EXPECT_EQ(ti2v.width, 64);
  EXPECT_EQ(ti2v.height, 32);
}

TEST(WanCardTest, TheSecondGuidanceScaleFollowsTheFirst) {
  const std::unique_ptr<ModelCard> card = MakeCard(Family::kA14B);
  EXPECT_EQ(Resolved(*card, {.guidance_scale = 6.5}).guidance_scale_2, 6.5);
  EXPECT_EQ(Resolved(*card, {.guidance_scale = 6.5, .guidance_scale_2 = 1.0}).guidance_scale_2,
            1.0);
  const VideoSettings second_only = Resolved(*card, {.guidance_scale_2 = 2.0});
  EXPECT_EQ(second_only.guidance_scale, 4);
  EXPECT_EQ(second_only.guidance_scale_2, 2);
}

TEST(WanCardTest, SeedsAreKeptAndDrawnOnesFitTheGenerator) {
  const std::unique_ptr<ModelCard> card = MakeCard(Family::kWan21);
  const uint64_t max = std::numeric_limits<uint64_t>::max();
  EXPECT_EQ(Resolved(*card, {.seed = max}, 7).seed, max);
  EXPECT_EQ(Resolved(*card, {.seed = 0}, 7).seed, 0u);
  EXPECT_EQ(Resolved(*card, {}, 7).seed, 7u);
  EXPECT_EQ(Resolved(*card, {}, (uint64_t{9} << 32) + 5).seed, 5u);
}

struct WrongField {
  RequestedSettings requested;
  const char* field;
  const char* says;
};

class WanCardViolationTest : public ::testing::TestWithParam<WrongField> {};

TEST_P(WanCardViolationTest, NamesTheFieldTheValueAndTheWayOut) {
  const std::unique_ptr<ModelCard> card = MakeCard(Family::kWan21);
  VideoSettings settings;
  const std::vector<FieldViolation> wrong = card->Resolve(GetParam().requested, 0, &settings);
  ASSERT_EQ(wrong.size(), 1u);
  EXPECT_EQ(wrong[0].field, GetParam().field);
  EXPECT_THAT(wrong[0].description, HasSubstr(GetParam().says));
}

constexpr int64_t kIntMin = std::numeric_limits<int64_t>::min();
constexpr int64_t kIntMax = std::numeric_limits<int64_t>::max();

INSTANTIATE_TEST_SUITE_P(
    All, WanCardViolationTest,
    ::testing::Values(
        WrongField{{.width = 0}, "settings.width", "width is 0, but must be from 16 to"},
        WrongField{{.width = -16}, "settings.width", "is -16"},
        WrongField{{.width = kIntMin}, "settings.width", "is -9223372036854775808"},
        WrongField{{.width = kIntMax}, "settings.width", "is 9223372036854775807"},
        WrongField{{.width = 16400}, "settings.width", "to 16384"},
        WrongField{{.width = 8}, "settings.width", "from 16"},
        WrongField{{.width = 100}, "settings.width", "the nearest are 96 and 112"},
        WrongField{{.height = 721}, "settings.height", "the nearest are 720 and 736"},
        WrongField{{.num_frames = 0}, "settings.num_frames", "is 0, but must be from 1 to 4093"},
        WrongField{{.num_frames = -5}, "settings.num_frames", "is -5"},
        WrongField{{.num_frames = kIntMax}, "settings.num_frames", "is 9223372036854775807"},
        WrongField{
            {.num_frames = 4093}, "settings.num_frames", "1597440 tokens, but at most 262144"},
        WrongField{{.width = 16384, .height = 16384}, "settings.num_frames", "a smaller size"},
        WrongField{{.fps = 0.0}, "settings.fps", "fps is 0"},
        WrongField{{.fps = -1.0}, "settings.fps", "fps is -1"},
        WrongField{{.fps = 241.0}, "settings.fps", "at most 240"},
        WrongField{{.fps = kNan}, "settings.fps", "fps is nan"},
        WrongField{{.fps = kInf}, "settings.fps", "fps is inf"},
        WrongField{{.num_inference_steps = 0}, "settings.num_inference_steps", "from 1 to 1000"},
        WrongField{{.num_inference_steps = 1001}, "settings.num_inference_steps", "is 1001"},
        WrongField{{.num_inference_steps = kIntMin}, "settings.num_inference_steps", "is -9"},
        WrongField{{.guidance_scale = kNan}, "settings.guidance_scale", "is nan"},
        WrongField{{.guidance_scale = -kInf}, "settings.guidance_scale", "is -inf"},
        WrongField{{.guidance_scale = -0.5}, "settings.guidance_scale", "from 0 to 100"},
        WrongField{{.guidance_scale = 1e30}, "settings.guidance_scale", "is 1e+30"},
        WrongField{{.guidance_scale_2 = 3.0}, "settings.guidance_scale_2", "leave it unset"},
        WrongField{{.flow_shift = 0.0}, "settings.flow_shift", "from 0.01 to 100"},
        WrongField{{.flow_shift = -3.0}, "settings.flow_shift", "is -3"},
        WrongField{{.flow_shift = kNan}, "settings.flow_shift", "is nan"},
        WrongField{{.flow_shift = 1e9}, "settings.flow_shift", "is 1e+09"},
        WrongField{
            {.solver = "ddim"}, "settings.solver", "unipc, unipc-legacy, euler, euler-native"},
        WrongField{{.solver = ""}, "settings.solver", "solver is \"\""},
        WrongField{{.solver = "\xff\n"}, "settings.solver", "\\xff\\n"}));

TEST(WanCardTest, EveryWrongFieldIsReportedAtOnce) {
  const std::unique_ptr<ModelCard> card = MakeCard(Family::kA14B);
  VideoSettings settings;
  const std::vector<FieldViolation> wrong = card->Resolve({.width = 1,
                                                           .height = 2,
                                                           .num_frames = 0,
                                                           .fps = kNan,
                                                           .num_inference_steps = 0,
                                                           .guidance_scale = kNan,
                                                           .guidance_scale_2 = kInf,
                                                           .flow_shift = 0.0,
                                                           .solver = "x"},
                                                          0, &settings);
  std::vector<std::string> fields;
  fields.reserve(wrong.size());
  for (const FieldViolation& violation : wrong) fields.push_back(violation.field);
  EXPECT_THAT(fields, UnorderedElementsAre(
                          "settings.width", "settings.height", "settings.num_frames",
                          "settings.fps", "settings.num_inference_steps", "settings.guidance_scale",
                          "settings.guidance_scale_2", "settings.flow_shift", "settings.solver"));
}

TEST(WanCardTest, SizesBeyondTheRotaryTableAreRefused) {
  WanTestRepository repository;  // rope_max_seq_len 32: at most 512 pixels, 125 frames
  repository.Write("dlo.json", {{"width", 512}, {"height", 512}, {"num_frames", 5}});
  absl::StatusOr<std::unique_ptr<ModelCard>> card = ReadModelCard(repository.root());
  ASSERT_TRUE(card.ok()) << card.status();
  VideoSettings settings;
  EXPECT_THAT((*card)->Resolve({}, 0, &settings), IsEmpty());
  EXPECT_EQ((*card)->Resolve({.width = 528}, 0, &settings)[0].field, "settings.width");
  EXPECT_THAT((*card)->Resolve({.width = 16, .num_frames = 125}, 0, &settings), IsEmpty());
  EXPECT_EQ((*card)->Resolve({.width = 16, .num_frames = 126}, 0, &settings)[0].field,
            "settings.num_frames");
}

TEST(WanCardTest, PromptsAreLimitedAndMustBeUtf8) {
  const std::unique_ptr<ModelCard> card = MakeCard(Family::kWan21);
  EXPECT_THAT(card->CheckPrompts("a red circle", ""), IsEmpty());
  EXPECT_THAT(card->CheckPrompts("\xe7\x8c\xab \xf0\x9f\x90\x88 \xc3\xa9", "\xed\x9f\xbf"),
              IsEmpty());
  EXPECT_THAT(card->CheckPrompts(std::string(32768, 'x'), std::string(32768, 'y')), IsEmpty());

  for (const char* empty : {"", "  ", "\n\t"}) {
    const std::vector<FieldViolation> wrong = card->CheckPrompts(empty, "");
    ASSERT_EQ(wrong.size(), 1u);
    EXPECT_EQ(wrong[0].field, "prompt");
    EXPECT_THAT(wrong[0].description, HasSubstr("is empty"));
  }
  for (const char* invalid : {"ab\xff", "ab\xc3", "ab\xc0\xaf", "ab\xe0\x80\xaf", "ab\xed\xa0\x80",
                              "ab\xf4\x90\x80\x80", "ab\xf0\x80\x80\x80", "ab\x80", "ab\xe7\x8c"}) {
    const std::vector<FieldViolation> wrong = card->CheckPrompts(invalid, invalid);
    ASSERT_EQ(wrong.size(), 2u) << invalid;
    EXPECT_EQ(wrong[0].field, "prompt");
    EXPECT_THAT(wrong[0].description, HasSubstr("not valid UTF-8 at byte 2"));
    EXPECT_EQ(wrong[1].field, "negative_prompt");
  }
  const std::vector<FieldViolation> wrong = card->CheckPrompts("x", std::string(32769, 'y'));
  ASSERT_EQ(wrong.size(), 1u);
  EXPECT_THAT(wrong[0].description, HasSubstr("32769 bytes, but at most 32768"));
}

TEST(WanCardTest, AWrongDefaultsFileIsRefusedByName) {
  const std::vector<std::pair<nlohmann::json, const char*>> cases = {
      {{{"width", 100}}, "width is 100"},
      {{{"width", "128"}}, "width is \"128\""},
      {{{"fps", -1}}, "fps is -1"},
      {{{"num_inference_steps", 0}}, "num_inference_steps is 0"},
      {{{"solver", "ddim"}}, "solver is \"ddim\""},
      {{{"guidance_scale_2", 3.0}}, "no second expert"},
      {nlohmann::json::array(), "JSON object"},
  };
  for (const auto& [content, says] : cases) {
    WanTestRepository repository;
    repository.AllowFullSize();
    repository.Write("dlo.json", content);
    const absl::Status status = ReadModelCard(repository.root()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("dlo.json"));
    EXPECT_THAT(status.message(), HasSubstr(says));
  }
}

TEST(WanCardTest, ACachedRepositoryHasItsHubName) {
  WanTestRepository repository;
  repository.AllowFullSize();
  WanTestRepository cache;
  const std::filesystem::path snapshot =
      cache.root() / "models--Wan-AI--Wan2.1-T2V-1.3B-Diffusers" / "snapshots" / "0fad780a";
  std::filesystem::create_directories(snapshot.parent_path());
  std::filesystem::copy(repository.root(), snapshot, std::filesystem::copy_options::recursive);
  EXPECT_EQ((*ReadModelCard(snapshot))->name(), "Wan-AI/Wan2.1-T2V-1.3B-Diffusers");
}

TEST(WanCardTest, SettingsChooseTheScheduler) {
  FlowSchedulerConfig repository;
  repository.solver_order = 1;
  VideoSettings settings;
  settings.flow_shift = 12;
  const std::vector<std::tuple<const char*, FlowSchedulerConfig::Solver, SigmaGrid>> cases = {
      {"unipc", FlowSchedulerConfig::Solver::kUniPC, SigmaGrid::kUniPC},
      {"unipc-legacy", FlowSchedulerConfig::Solver::kUniPC, SigmaGrid::kUniPCLegacy},
      {"euler", FlowSchedulerConfig::Solver::kEuler, SigmaGrid::kEuler},
      {"euler-native", FlowSchedulerConfig::Solver::kEuler, SigmaGrid::kEulerNative}};
  for (const auto& [name, solver, grid] : cases) {
    settings.solver = name;
    const absl::StatusOr<FlowSchedulerConfig> config = ResolveScheduler(repository, settings);
    ASSERT_TRUE(config.ok());
    EXPECT_EQ(config->solver, solver);
    EXPECT_EQ(config->grid, grid);
    EXPECT_EQ(config->shift, 12);
    EXPECT_EQ(config->solver_order, 1);
  }
  settings.solver = "heun";
  EXPECT_EQ(ResolveScheduler(repository, settings).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dlo
