#include "loader/hwr/identity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "base/sha256.h"
#include "nlohmann/json.hpp"

namespace dlo::hwr {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

IdentityInputs Inputs() {
  return {.source = Sha256Of("source"),
          .family = "wan",
          .model_config = Sha256Of("config"),
          .dtype = "BF16",
          .layout = Sha256Of("layout")};
}

std::string KeyOf(const IdentityInputs& inputs) {
  const absl::StatusOr<Identity> identity = MakeIdentity(inputs);
  EXPECT_TRUE(identity.ok()) << identity.status();
  return identity.ok() ? identity->key : "";
}

TEST(CanonicalJsonTest, SortsKeysLeavesNoBlanksAndEscapesWhatIsNotAscii) {
  EXPECT_EQ(*CanonicalJson(json::parse("{\"b\": [1, 2.5, null], \"a\": \"\u00e9\"}")),
            "{\"a\":\"\\u00e9\",\"b\":[1,2.5,null]}");
}

TEST(CanonicalJsonTest, RefusesWhatHasNoCanonicalForm) {
  EXPECT_FALSE(CanonicalJson({{"a", std::numeric_limits<double>::quiet_NaN()}}).ok());
  EXPECT_FALSE(CanonicalJson({{"a", {1, std::numeric_limits<double>::infinity()}}}).ok());
  EXPECT_FALSE(CanonicalJson({{"a", "\xff"}}).ok());
  EXPECT_FALSE(CanonicalJson({{"\xff", 1}}).ok());
  EXPECT_FALSE(CanonicalJson({{"a", json::binary({1, 2})}}).ok());
  json deep;
  for (int i = 0; i < 100; ++i) deep = json::array({deep});
  EXPECT_FALSE(CanonicalJson(deep).ok());
}

TEST(IdentityTest, EachFieldChangedAloneGivesAnotherKey) {
  const std::vector<std::function<void(IdentityInputs&)>> changes = {
      [](IdentityInputs& in) { in.source = Sha256Of("another source"); },
      [](IdentityInputs& in) { in.family = std::string("hunyuan"); },
      [](IdentityInputs& in) { in.model_config = Sha256Of("another config"); },
      [](IdentityInputs& in) { in.dtype = std::string("F32"); },
      [](IdentityInputs& in) { in.quantization = std::string("fp8"); },
      [](IdentityInputs& in) { in.layout = Sha256Of("another layout"); },
      [](IdentityInputs& in) { in.tp_size = 2; },
      [](IdentityInputs& in) {
        in.tp_size = 2;
        in.tp_rank = 1;
      },
      [](IdentityInputs& in) {
        in.adaptation = std::string("lora");
        in.adaptation_fingerprint = Sha256Of("lora");
      },
      [](IdentityInputs& in) { in.producer = std::string("another"); },
  };
  std::set<std::string> keys = {KeyOf(Inputs())};
  for (const auto& change : changes) {
    IdentityInputs inputs = Inputs();
    change(inputs);
    EXPECT_TRUE(keys.insert(KeyOf(inputs)).second) << MakeIdentity(inputs)->document;
  }
  EXPECT_EQ(KeyOf(Inputs()), KeyOf(Inputs()));
}

TEST(IdentityTest, TheKeyIsTheDigestOfTheDocumentWhichReadsBack) {
  const absl::StatusOr<Identity> identity = MakeIdentity(Inputs());
  ASSERT_TRUE(identity.ok());
  EXPECT_EQ(identity->key, Sha256Of(identity->document));
  const absl::StatusOr<Identity> again = ParseIdentity(identity->document);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->key, identity->key);
  EXPECT_EQ(again->document, identity->document);
}

// The key names artifacts on disk: it changes only with an edit of the rules that means to.
TEST(IdentityTest, TheKeyOfKnownInputsIsKnown) {
  EXPECT_EQ(KeyOf(Inputs()), "aa0bf9713132f21696f136cb0349c170b6e83bc5acbce2f633f4635d746bce0e");
}

TEST(IdentityTest, RefusesInputsThatAreNoIdentity) {
  const std::vector<std::function<void(IdentityInputs&)>> changes = {
      [](IdentityInputs& in) { in.source = std::string(""); },
      [](IdentityInputs& in) { in.source = std::string(64, 'A'); },
      [](IdentityInputs& in) { in.layout.pop_back(); },
      [](IdentityInputs& in) { in.model_config.push_back('0'); },
      [](IdentityInputs& in) { in.family = std::string(""); },
      [](IdentityInputs& in) { in.family = std::string("a/b"); },
      [](IdentityInputs& in) { in.dtype = std::string(129, 'a'); },
      [](IdentityInputs& in) { in.tp_size = 0; },
      [](IdentityInputs& in) { in.tp_rank = 1; },
      [](IdentityInputs& in) { in.tp_rank = -1; },
      [](IdentityInputs& in) { in.adaptation = std::string("lora"); },
      [](IdentityInputs& in) { in.adaptation_fingerprint = Sha256Of("base with one"); },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    IdentityInputs inputs = Inputs();
    changes[i](inputs);
    EXPECT_EQ(MakeIdentity(inputs).status().code(), absl::StatusCode::kInvalidArgument) << i;
  }
}

class ParseIdentityTest : public ::testing::Test {
 protected:
  json Document() { return json::parse(MakeIdentity(Inputs())->document); }
  static absl::Status Parse(const json& document) {
    return ParseIdentity(document.dump()).status();
  }
};

TEST_F(ParseIdentityTest, RefusesAMissingAndAnUnknownKeyInEverySection) {
  const json whole = Document();
  for (const auto& [key, value] : whole.items()) {
    json without = whole;
    without.erase(key);
    EXPECT_THAT(Parse(without).message(), HasSubstr(key + " is missing"));
    if (!value.is_object()) continue;
    for (const auto& [inner, ignored] : value.items()) {
      json lacking = whole;
      lacking[key].erase(inner);
      EXPECT_THAT(Parse(lacking).message(), HasSubstr(inner + " is missing"));
    }
    json extended = whole;
    extended[key]["more"] = 1;
    EXPECT_THAT(Parse(extended).message(), HasSubstr("\"more\" is not known")) << key;
  }
  json extended = whole;
  extended["more"] = 1;
  EXPECT_FALSE(Parse(extended).ok());
}

TEST_F(ParseIdentityTest, ConvertsNothing) {
  const auto refused = [&](const char* section, const char* key, const json& value) {
    json document = Document();
    document[section][key] = value;
    EXPECT_EQ(Parse(document).code(), absl::StatusCode::kInvalidArgument) << key << " " << value;
  };
  for (const json& value : {json(true), json("1"), json(1.0), json(nullptr), json(-1), json(0),
                            json(uint64_t{1} << 63), json::array({1})}) {
    refused("layout", "tp_size", value);
    refused("producer", "manifest_schema", value);
  }
  for (const json& value : {json(1), json(true), json(nullptr), json::object()}) {
    refused("model", "family", value);
    refused("source", "fingerprint", value);
  }
  json document = Document();
  document["schema"] = true;
  EXPECT_FALSE(Parse(document).ok());
  document["schema"] = 2;
  EXPECT_FALSE(Parse(document).ok());
  document = Document();
  document["model"] = json::array();
  EXPECT_FALSE(Parse(document).ok());
}

TEST_F(ParseIdentityTest, RefusesBytesThatAreNotCanonical) {
  const std::string canonical = Document().dump();
  EXPECT_TRUE(ParseIdentity(canonical).ok());
  EXPECT_THAT(ParseIdentity(canonical + "\n").status().message(), HasSubstr("canonical"));
  EXPECT_THAT(ParseIdentity(Document().dump(1)).status().message(), HasSubstr("canonical"));
  std::string escaped = canonical;
  escaped.replace(escaped.find("\"wan\""), 5, "\"\\u0077an\"");
  EXPECT_THAT(ParseIdentity(escaped).status().message(), HasSubstr("canonical"));
  // One key twice, a NaN, and bytes behind the end.
  EXPECT_FALSE(ParseIdentity("{\"schema\":1,\"schema\":1}").ok());
  EXPECT_FALSE(ParseIdentity("{\"schema\":NaN}").ok());
  EXPECT_FALSE(ParseIdentity(canonical + "{}").ok());
  EXPECT_FALSE(ParseIdentity("").ok());
  EXPECT_FALSE(ParseIdentity(std::string(kIdentityBytesMax + 1, ' ')).ok());
}

}  // namespace
}  // namespace dlo::hwr
