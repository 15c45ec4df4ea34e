#include "base/json.h"

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dlo {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(JsonTest, ParsesADocument) {
  const absl::StatusOr<json> document =
      ParseJson(R"({"a": [1, {"b": null}], "c": "d", "e": -1.5, "f": true})", "x");
  ASSERT_TRUE(document.ok()) << document.status();
  EXPECT_EQ(*document, json({{"a", {1, {{"b", nullptr}}}}, {"c", "d"}, {"e", -1.5}, {"f", true}}));
}

TEST(JsonTest, RefusesWhatIsNoJsonOrIsMeantToHurt) {
  const std::vector<std::pair<std::string, const char*>> cases = {
      {"", "parse error"},
      {"{", "parse error"},
      {"{\"a\":}", "parse error"},
      {"{} x", "parse error"},
      {"NaN", "parse error"},
      {"1e999", "number overflow"},
      {"\"\xff\"", "parse error"},
      {"{\"a\": 1, \"a\": 1}", "the key \"a\" is given twice"},
      {"[{\"k\": {\"a\": 1, \"a\": 1}}]", "given twice"},
      {std::string(65, '[') + std::string(65, ']'), "more than 64 levels"},
      {std::string(1000000, '['), "more than 64 levels"},
  };
  for (const auto& [text, says] : cases) {
    const absl::Status status = ParseJson(text, "some.json").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text.substr(0, 40);
    EXPECT_THAT(status.message(), HasSubstr("some.json: "));
    EXPECT_THAT(status.message(), HasSubstr(says));
  }
  EXPECT_TRUE(ParseJson(std::string(64, '[') + std::string(64, ']'), "x").ok());
}

TEST(JsonTest, TheSameKeyInTwoObjectsIsFine) {
  EXPECT_TRUE(ParseJson(R"([{"a": 1}, {"a": {"a": 2}}])", "x").ok());
}

TEST(JsonTest, OnlyRegularFilesAreRead) {
  EXPECT_EQ(ReadJsonFile("/nowhere/a.json").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadJsonFile(std::filesystem::temp_directory_path()).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadJsonFile("/dev/zero").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(JsonReaderTest, MissingKeysLeaveTheDefaults) {
  const json object = {{"set", 7}, {"nothing", nullptr}};
  JsonReader reader("f", object);
  int64_t set = 1, unset = 2;
  std::optional<int64_t> nothing = 3;
  std::vector<double> list = {0.5};
  reader.Int("set", 0, 10, &set);
  reader.Int("unset", 0, 10, &unset);
  reader.OptionalInt("nothing", 0, 10, &nothing);
  reader.DoubleList("list", 0, 1, 4, &list);
  EXPECT_TRUE(reader.Finish().ok());
  EXPECT_EQ(set, 7);
  EXPECT_EQ(unset, 2);
  EXPECT_EQ(nothing, std::nullopt);
  EXPECT_THAT(list, ElementsAre(0.5));
}

TEST(JsonReaderTest, WrongValuesAreNamedAndNotTaken) {
  const json object = {{"int", 11},        {"float", 1.0},        {"text", 3},
                       {"bool", "true"},   {"number", json("x")}, {"list", {1, "2"}},
                       {"long", {1, 2, 3}}};
  JsonReader reader("f.json", object);
  int64_t integer = -1;
  double number = -2;
  bool boolean = false;
  std::string text = "kept";
  std::vector<int64_t> list = {9};
  reader.Int("int", 0, 10, &integer);
  reader.Int("float", 0, 10, &integer);
  reader.String("text", &text);
  reader.Bool("bool", &boolean);
  reader.Double("number", 0, 1, &number);
  reader.IntList("list", 0, 10, 2, &list);
  reader.IntList("long", 0, 10, 2, &list);
  const std::string message(reader.Finish().message());
  EXPECT_EQ(integer, -1);
  EXPECT_EQ(text, "kept");
  EXPECT_THAT(list, ElementsAre(9));
  for (const char* says :
       {"f.json: ", "int is 11, but must be an integer from 0 to 10", "float is 1.0", "text is 3",
        "bool is \"true\"", "number is \"x\", but must be a number from 0 to 1", "list is \"2\"",
        "long is [1,2,3], but must be a list of at most 2"}) {
    EXPECT_THAT(message, HasSubstr(says));
  }
}

TEST(JsonReaderTest, LongValuesAreShortenedInMessages) {
  const json object = {{"a", std::string(100000, 'x')}};
  JsonReader reader("f", object);
  int64_t value = 0;
  reader.Int("a", 0, 1, &value);
  EXPECT_LT(reader.Finish().message().size(), 300u);
}

TEST(JsonReaderTest, RequireAlsoJudgesTheDefault) {
  const json object = {{"given", "b"}};
  JsonReader reader("f", object);
  reader.Require("given", {"a"}, "a", "because");
  reader.Require("missing", {true}, false, "");
  reader.Require("fine", {true}, true, "");
  const std::string message(reader.Finish().message());
  EXPECT_THAT(message, HasSubstr("given is \"b\", but must be \"a\": because"));
  EXPECT_THAT(message,
              HasSubstr("missing is false (the default, as the key is missing), but must be true"));
}

}  // namespace
}  // namespace dlo
