#include "server/compatibility_key.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "models/wan/wan_plan.h"
#include "server/request_resolution.h"

namespace dlo {
namespace {

using nlohmann::json;

struct Request {
  JobSpec spec;
  json extras = json::object();
};

Request Plain() {
  Request request;
  request.spec.id = "first";
  request.spec.prompt = "a cat";
  request.spec.settings = {.width = 832,
                           .height = 480,
                           .num_frames = 81,
                           .fps = 16,
                           .num_inference_steps = 50,
                           .guidance_scale = 5,
                           .guidance_scale_2 = 4,
                           .flow_shift = 3,
                           .solver = "unipc",
                           .seed = 1};
  return request;
}

std::string Strict(const Request& request) {
  return CompatibilityKey(request.spec.settings, request.spec.output_format, request.extras)
      .value();
}

// Of a model with two experts of two blocks, the first above half of the noise.
std::string Schedule(const Request& request) {
  WanConfig config;
  config.transformer.num_layers = 2;
  config.transformer_2 = config.transformer;
  config.boundary_ratio = 0.5;
  config.text_encoder.num_layers = 2;
  return WanVisitPlan(config, request.spec.settings).value().digest();
}

struct Change {
  const char* what;
  std::function<void(Request&)> apply;
  bool strict_shares;
  bool schedule_shares;
};

// Each row changes one thing of a request and says whether it may still share a wave with the one
// that it was: by its settings, or by its visit plan alone. The numbers are those of the reference
// page's rows.
const std::vector<Change>& Changes() {
  static const std::vector<Change>* const changes = new std::vector<Change>{
      // 47: what never matters.
      {"prompt", [](Request& r) { r.spec.prompt = "a dog, at length"; }, true, true},
      {"seed", [](Request& r) { r.spec.settings.seed = 77; }, true, true},
      {"id", [](Request& r) { r.spec.id = "second"; }, true, true},
      {"deadline", [](Request& r) { r.spec.deadline = absl::UnixEpoch(); }, true, true},
      // 158: guidance runs by its scale here, so a negative prompt, given or not, changes nothing.
      {"negative prompt", [](Request& r) { r.spec.negative_prompt = "blurred"; }, true, true},
      // 35, 69.
      {"width", [](Request& r) { r.spec.settings.width = 480; }, false, true},
      {"height", [](Request& r) { r.spec.settings.height = 832; }, false, true},
      {"frames", [](Request& r) { r.spec.settings.num_frames = 49; }, false, true},
      {"fps", [](Request& r) { r.spec.settings.fps = 24; }, false, true},
      // 36.
      {"guidance scale", [](Request& r) { r.spec.settings.guidance_scale = 6; }, false, true},
      {"guidance off", [](Request& r) { r.spec.settings.guidance_scale = 1; }, false, false},
      {"second scale", [](Request& r) { r.spec.settings.guidance_scale_2 = 3; }, false, true},
      {"second guidance off", [](Request& r) { r.spec.settings.guidance_scale_2 = 1; }, false,
       true},
      {"one expert", [](Request& r) { r.spec.settings.guidance_scale_2.reset(); }, false, true},
      // 37, 40, 55.
      {"steps", [](Request& r) { r.spec.settings.num_inference_steps = 49; }, false, false},
      {"solver", [](Request& r) { r.spec.settings.solver = "euler"; }, false, false},
      {"shift", [](Request& r) { r.spec.settings.flow_shift = 5; }, false, false},
      {"output", [](Request& r) { r.spec.output_format = v1::OUTPUT_FORMAT_PNG_SHEET; }, false,
       true},
      // 70, 159.
      {"extras", [](Request& r) { r.extras = {{"flag", true}}; }, false, true},
      {"null extras", [](Request& r) { r.extras = nullptr; }, false, true}};
  return *changes;
}

TEST(CompatibilityKeyTest, EachFieldSeparatesExactlyTheRequestsThatItShould) {
  for (const Change& change : Changes()) {
    Request changed = Plain();
    change.apply(changed);
    EXPECT_EQ(Strict(changed) == Strict(Plain()), change.strict_shares) << change.what;
    EXPECT_EQ(Schedule(changed) == Schedule(Plain()), change.schedule_shares) << change.what;
  }
}

// Rows 60 and 159.
TEST(CompatibilityKeyTest, ExtrasCompareAsJson) {
  const struct {
    const char* a;
    const char* b;
    bool equal;
  } kRows[] = {{R"({"flag": true})", R"({"flag": false})", false},
               {R"({"a": {"b": 1}})", R"({"a": {"b": 2}})", false},
               {R"({"a": 1, "b": {"c": 2, "d": 3}})", R"({"b": {"d": 3, "c": 2}, "a": 1})", true},
               {R"({"a": [1, 2]})", R"({"a": [2, 1]})", false},
               {"null", "{}", false},
               {R"({"a": null})", "{}", false}};
  for (const auto& row : kRows) {
    Request a = Plain();
    a.extras = json::parse(row.a);
    Request b = Plain();
    b.extras = json::parse(row.b);
    EXPECT_EQ(Strict(a) == Strict(b), row.equal) << row.a << " " << row.b;
  }
}

// Rows 73 and 160.
TEST(CompatibilityKeyTest, WhatHasNoJsonIsRefused) {
  for (const json& bad : {json(std::nan("")), json(INFINITY), json("\xff")}) {
    const auto key =
        CompatibilityKey(Plain().spec.settings, v1::OUTPUT_FORMAT_MP4, {{"a", {1, bad}}});
    EXPECT_TRUE(absl::IsInvalidArgument(key.status())) << key.status();
  }
}

TEST(CompatibilityKeyTest, NamesTheFieldsInWhichTwoKeysDiffer) {
  using testing::IsEmpty;
  using testing::UnorderedElementsAre;
  const std::string plain = Strict(Plain());
  EXPECT_THAT(DifferingFields(plain, plain), IsEmpty());
  Request other = Plain();
  other.spec.settings.width = 16;
  other.spec.settings.solver = "euler";
  EXPECT_THAT(DifferingFields(plain, Strict(other)), UnorderedElementsAre("width", "solver"));
  other = Plain();
  other.spec.settings.guidance_scale_2.reset();
  other.extras = {{"a", 1}};
  EXPECT_THAT(DifferingFields(plain, Strict(other)),
              UnorderedElementsAre("guidance_scale_2", "extras"));
  EXPECT_THAT(DifferingFields(Schedule(Plain()), "another digest"),
              UnorderedElementsAre("schedule"));
  EXPECT_THAT(DifferingFields(plain, "1234"), UnorderedElementsAre("schedule"));
}

TEST(CompatibilityKeyTest, EveryFieldOfAKeyIsOneOfTheFields) {
  const json key = json::parse(Strict(Plain()));
  for (const auto& [field, value] : key.items()) {
    EXPECT_THAT(CompatibilityFields(), testing::Contains(field));
  }
  EXPECT_THAT(CompatibilityFields(), testing::Contains("schedule"));
}

}  // namespace
}  // namespace dlo
