// The rules of the reference page on which requests share a wave, which are deferred and which
// refused (sections 1.8 and 2.10), from a client's request to the waves, on a virtual clock and
// with the demo model's card. Rows that are about replies are scheduler_test.cc's and
// waves_test.cc's.
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "models/model_card.h"
#include "server/compatibility_key.h"
#include "server/request_resolution.h"
#include "server/wave_former.h"

namespace dlo {
namespace {

using nlohmann::json;

struct Asked {
  std::string id;
  std::function<void(v1::GenerateRequest&)> change = [](v1::GenerateRequest&) {};
  // Of a model that has extra parameters; the demo model has none.
  json extras = json::object();
};

Asked Wide(const std::string& id) {
  return {id, [](v1::GenerateRequest& r) { r.mutable_settings()->set_width(64); }};
}
Asked WithPrompt(const std::string& id, const std::string& prompt) {
  return {id, [prompt](v1::GenerateRequest& r) { r.set_prompt(prompt); }};
}
Asked WithNegative(const std::string& id, const std::string& negative) {
  return {id, [negative](v1::GenerateRequest& r) { r.set_negative_prompt(negative); }};
}
Asked WithUnknown(const std::string& id, const std::string& key) {
  return {id, [key](v1::GenerateRequest& r) {
            (*r.mutable_extra()->mutable_fields())[key].set_string_value("x");
          }};
}
Asked WithExtras(const std::string& id, json extras) {
  return {id, [](v1::GenerateRequest&) {}, std::move(extras)};
}
Asked WithSteps(const std::string& id, int steps) {
  return {id, [steps](v1::GenerateRequest& r) {
            r.mutable_settings()->set_num_inference_steps(steps);
          }};
}

// The requests come one after the other while the domain, of four replicas, is busy; then one wave
// runs after the other. "a c | b, refused d": a and c in the first wave, b in the second.
std::string WavesOf(const ModelCard& card, const std::vector<Asked>& asked) {
  WaveFormer former({.max_waiting = 64, .max_wait = absl::Milliseconds(500)});
  absl::Time now = absl::UnixEpoch();
  std::vector<std::string> refused;
  for (const Asked& one : asked) {
    v1::GenerateRequest request;
    request.set_request_id(one.id);
    request.set_prompt("a red circle");
    one.change(request);
    JobSpec spec;
    const bool valid = ResolveRequest(card, request, &spec).empty();
    const auto key = CompatibilityKey(spec.settings, spec.output_format, one.extras);
    if (!valid || !key.ok() || !former.Add({spec.id, *key}, now)) refused.push_back(one.id);
  }
  std::vector<std::string> waves;
  while (former.size() > 0) {
    now += absl::Seconds(30);
    const WaveSlot slot{4, now};
    now = std::max(now, former.NextTime(slot));
    waves.push_back(absl::StrJoin(former.TakeWave(slot, now), " "));
  }
  return absl::StrCat(absl::StrJoin(waves, " | "), refused.empty() ? "" : ", refused ",
                      absl::StrJoin(refused, " "));
}

struct Rule {
  const char* rows;  // of the reference page
  const char* what;
  std::vector<Asked> asked;
  const char* waves;
};

std::vector<Rule> Rules() {
  const json nested_1 = {{"a", {{"b", 1}}}};
  const json nested_2 = {{"a", {{"b", 2}}}};
  return {
      {"69",
       "another key leads a later wave, without an error",
       {{"a"}, Wide("b"), {"c"}},
       "a c | b"},
      {"69",
       "whoever fits the head joins it from behind others",
       {Wide("a"), {"b"}, {"c"}, Wide("d"), {"e"}},
       "a d | b c e"},
      {"55 57",
       "steps that were left out are the model's default, before anything is compared",
       {{"a"}, WithSteps("b", 20), WithSteps("c", 21)},
       "a b | c"},
      {"70 159",
       "extra parameters that differ defer",
       {WithExtras("a", {{"flag", true}}), WithExtras("b", {{"flag", false}}),
        WithExtras("c", {{"flag", true}})},
       "a c | b"},
      {"159", "nested ones, too", {WithExtras("a", nested_1), WithExtras("b", nested_2)}, "a | b"},
      {"159", "none is not an empty one", {WithExtras("a", nullptr), {"b"}}, "a | b"},
      {"159",
       "their order is nothing",
       {WithExtras("a", {{"x", 1}, {"y", 2}}), WithExtras("b", {{"y", 2}, {"x", 1}})},
       "a b"},
      // A text encoder sees text alone: embeddings are no part of the API.
      {"71 161 74",
       "embeddings and adapters are refused where the model knows none",
       {{"a"}, WithUnknown("b", "prompt_embeds"), WithUnknown("c", "lora_name"), {"d"}},
       "a d, refused b c"},
      {"72 162",
       "an empty prompt is refused, first, last or both, and harms nobody",
       {WithPrompt("a", ""), {"b"}, {"c"}, WithPrompt("d", " ")},
       "b c, refused a d"},
      {"72 162",
       "a prompt that is no text is refused and harms nobody",
       {{"a"}, WithPrompt("b", "\xff"), {"c"}},
       "a c, refused b"},
      {"73 160",
       "what has no JSON fails its own submission, the others' wave is full",
       {{"a"}, {"b"}, WithExtras("c", {{"x", "\xff"}}), {"d"}, {"e"}},
       "a b d e, refused c"},
      {"75 77 163",
       "a request that cannot run is refused at the door; the next waves are whole",
       {{"a"}, WithSteps("b", 0), {"c"}, {"d"}, {"e"}, {"f"}},
       "a c d e | f, refused b"},
      {"158",
       "negative prompts, given or not, and their texts are nothing: guidance runs by its scale",
       {{"a"}, WithNegative("b", "blurred"), WithNegative("c", "dark"), WithNegative("d", "")},
       "a b c d"},
      {"47",
       "prompts of any length are nothing",
       {WithPrompt("a", "x"), WithPrompt("b", std::string(300, 'y'))},
       "a b"},
      {"79 85", "a wave that is not full runs all the same", {{"a"}}, "a"},
  };
}

TEST(WaveRulesTest, EachRowOfTheReferenceHolds) {
  const auto card = ReadModelCard(DLO_SOURCE_DIR "/assets/shapes");
  ASSERT_TRUE(card.ok()) << card.status();
  for (const Rule& rule : Rules()) {
    EXPECT_EQ(WavesOf(**card, rule.asked), rule.waves) << "row " << rule.rows << ": " << rule.what;
  }
}

// No request waits behind an incompatible one longer than that one's wave: whoever leads a wave is
// older than all that wait, so a request sees a key go before it at most as often as that key's
// requests before it fill waves, and nobody who came later takes a wave of its own.
TEST(WaveRulesTest, NobodyWaitsBehindAnIncompatibleRequestLongerThanOneWave) {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    WaveFormer former({.max_waiting = 1000, .max_wait = absl::Milliseconds(500)});
    std::vector<int> keys;
    std::map<int, std::map<int, int>> led_before;  // request: key: waves of it while it waited
    std::map<int, std::map<int, int>> older;       // request: key: requests that were there first
    std::map<int, int> waiting;                    // request: key
    absl::Time now = absl::UnixEpoch();
    const auto arrive = [&] {
      const int id = static_cast<int>(keys.size());
      keys.push_back(static_cast<int>(random() % 5));
      for (const auto& [other, key] : waiting) ++older[id][key];
      waiting[id] = keys.back();
      former.Add({absl::StrCat(id), absl::StrCat(keys.back())}, now);
    };
    for (int i = 0; i < 20; ++i) arrive();
    while (former.size() > 0) {
      now += absl::Seconds(1);
      for (unsigned i = random() % 4; i > 0 && keys.size() < 60; --i) arrive();
      const WaveSlot slot{4, now - absl::Seconds(1)};
      const std::vector<std::string> wave = former.TakeWave(slot, now);
      ASSERT_FALSE(wave.empty());
      const int key = keys[std::stoi(wave[0])];
      for (const std::string& id : wave) {
        ASSERT_EQ(keys[std::stoi(id)], key);
        waiting.erase(std::stoi(id));
      }
      for (const auto& [id, own] : waiting) {
        ASSERT_GT(id, std::stoi(wave[0]));
        ++led_before[id][key];
      }
    }
    for (const auto& [id, waves] : led_before) {
      for (const auto& [key, count] : waves) {
        // Each of the older requests at most once, four of them at a time.
        EXPECT_LE(count, (older[id][key] + 3) / 4) << "request " << id << ", key " << key;
      }
    }
  }
}

}  // namespace
}  // namespace dlo
