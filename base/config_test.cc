#include "base/config.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dlo {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const ConfigSchema& Schema() {
  static const auto* const schema = new ConfigSchema{
      {.key = "model.path",
       .type = ConfigType::kPathOrName,
       .flag = "--model",
       .fallback = "demo/model",
       .help = ""},
      {.key = "model.dtype",
       .flag = "--dtype",
       .fallback = "auto",
       .allowed = {"auto", "float32", "bfloat16"},
       .help = ""},
      {.key = "listen", .flag = "--listen", .fallback = "127.0.0.1:50051", .help = ""},
      {.key = "data_dir",
       .type = ConfigType::kPath,
       .flag = "--data-dir",
       .fallback = "/var/dlo",
       .help = ""},
      {.key = "offload.slots",
       .type = ConfigType::kInt,
       .flag = "--slots",
       .fallback = "2",
       .min = 2,
       .max = 16,
       .help = ""},
      {.key = "offload.budget",
       .type = ConfigType::kBytes,
       .flag = "--budget",
       .fallback = "1GiB",
       .help = ""},
      {.key = "offload.eager",
       .type = ConfigType::kBool,
       .flag = "--eager",
       .fallback = "false",
       .help = ""},
      {.key = "grace",
       .type = ConfigType::kDuration,
       .flag = "--grace",
       .fallback = "5m",
       .help = ""},
  };
  return *schema;
}

// A folder with one configuration file.
class ConfigFile {
 public:
  explicit ConfigFile(const std::string& text) {
    std::string folder = (std::filesystem::temp_directory_path() / "config-XXXXXX").string();
    folder_ = mkdtemp(folder.data());
    std::ofstream(path(), std::ios::binary) << text;
  }
  ~ConfigFile() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  ConfigFile(const ConfigFile&) = delete;
  ConfigFile& operator=(const ConfigFile&) = delete;

  const std::filesystem::path& folder() const { return folder_; }
  std::filesystem::path path() const { return folder_ / "c.yaml"; }

 private:
  std::filesystem::path folder_;
};

absl::StatusOr<Config> LoadText(const std::string& text) {
  const ConfigFile file(text);
  return Config::Load(Schema(), {.file = file.path()});
}

TEST(ConfigTest, DefaultsHoldWithoutAnySource) {
  const absl::StatusOr<Config> config = Config::Load(Schema(), {});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->String("listen"), "127.0.0.1:50051");
  EXPECT_EQ(config->Int("offload.slots"), 2);
  EXPECT_EQ(config->Bytes("offload.budget"), 1 << 30);
  EXPECT_FALSE(config->Bool("offload.eager"));
  EXPECT_EQ(config->Duration("grace"), absl::Minutes(5));
  EXPECT_EQ(config->Path("data_dir"), "/var/dlo");
  EXPECT_EQ(config->OriginText("listen"), "default");
  EXPECT_TRUE(config->IsDefault("listen"));
}

TEST(ConfigTest, FlagBeatsEnvironmentBeatsFileBeatsDefault) {
  const ConfigFile file("offload:\n  slots: 3\n  budget: 2GiB\n  eager: true\n");
  const ConfigSources sources = {.file = file.path(),
                                 .environment = {{"DLO_OFFLOAD_SLOTS", "4"},
                                                 {"DLO_OFFLOAD_BUDGET", "3GiB"},
                                                 {"HOME", "/root"}},
                                 .flags = {{"--slots", "5"}}};
  const absl::StatusOr<Config> config = Config::Load(Schema(), sources);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->Int("offload.slots"), 5);
  EXPECT_EQ(config->OriginText("offload.slots"), "flag --slots");
  EXPECT_EQ(config->Bytes("offload.budget"), 3ll << 30);
  EXPECT_EQ(config->OriginText("offload.budget"), "env DLO_OFFLOAD_BUDGET");
  EXPECT_TRUE(config->Bool("offload.eager"));
  EXPECT_EQ(config->OriginText("offload.eager"), "file " + file.path().string() + ":4");
  EXPECT_EQ(config->OriginText("grace"), "default");
}

TEST(ConfigTest, RelativePathsStartAtTheFile) {
  const ConfigFile file("data_dir: ../data\n");
  const absl::StatusOr<Config> from_file = Config::Load(Schema(), {.file = file.path()});
  EXPECT_EQ(from_file->Path("data_dir"), (file.folder() / "../data").lexically_normal());
  const absl::StatusOr<Config> from_flag =
      Config::Load(Schema(), {.file = file.path(), .flags = {{"--data-dir", "here"}}});
  EXPECT_EQ(from_flag->Path("data_dir"), std::filesystem::current_path() / "here");
}

TEST(ConfigTest, ANameIsAPathWhereItLooksLikeOneOrExists) {
  const ConfigFile named("model: {path: org/name}\n");
  EXPECT_EQ(Config::Load(Schema(), {.file = named.path()})->PathOrName("model.path"), "org/name");
  std::filesystem::create_directories(named.folder() / "org/name");
  EXPECT_EQ(Config::Load(Schema(), {.file = named.path()})->PathOrName("model.path"),
            named.folder() / "org/name");
  const ConfigFile relative("model: {path: ./org/../name}\n");
  EXPECT_EQ(Config::Load(Schema(), {.file = relative.path()})->PathOrName("model.path"),
            relative.folder() / "name");
  const ConfigFile home("model: {path: ~/name}\n");
  EXPECT_EQ(Config::Load(Schema(), {.file = home.path()})->PathOrName("model.path"),
            std::filesystem::path(getenv("HOME")) / "name");
}

TEST(ConfigTest, EmptyFilesAndSectionsAreFine) {
  for (const char* text : {"", "# nothing\n", "---\n", "offload:\n", "offload: {}\n", "~\n"}) {
    EXPECT_TRUE(LoadText(text).ok()) << text << LoadText(text).status();
  }
}

struct WrongFile {
  const char* text;
  const char* says;
};

class ConfigRefusalTest : public ::testing::TestWithParam<WrongFile> {};

TEST_P(ConfigRefusalTest, NamesLineAndWayOut) {
  const absl::Status status = LoadText(GetParam().text).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr(GetParam().says));
}

INSTANTIATE_TEST_SUITE_P(
    All, ConfigRefusalTest,
    ::testing::Values(
        WrongFile{"modle:\n  path: x\n",
                  "c.yaml:2: unknown key \"modle.path\"; did you mean model.path?"},
        WrongFile{"model:\n  pth: x\n",
                  "c.yaml:2: unknown key \"model.pth\"; did you mean model.path?"},
        WrongFile{"slots: 3\n", "unknown key \"slots\"; did you mean offload.slots?"},
        WrongFile{"model:\n  slots: 3\n", "did you mean offload.slots?"},
        WrongFile{"completely_different: 3\n", "known are model.path, model.dtype, listen"},
        WrongFile{"listen:\n  port: 3\n", "unknown key \"listen.port\""},
        WrongFile{"extra: {}\n", "unknown key \"extra\""},
        WrongFile{"model.path: x\n", "model.path must be nested: model: {path: ...}"},
        WrongFile{"listen: a\nlisten: b\n", "c.yaml:2: listen is given twice, first in line 1"},
        WrongFile{"model:\n  path: a\nmodel:\n  dtype: auto\n", "c.yaml:3: model is given twice"},
        WrongFile{"model: x\n", "model is \"x\", but must be a mapping with keys such as path"},
        WrongFile{"model: [a]\n", "model must not be a list"},
        WrongFile{"listen: [a]\n", "c.yaml:1: listen must not be a list"},
        WrongFile{"listen:\n", "listen has no value"},
        WrongFile{"listen: ~\n", "listen has no value"},
        WrongFile{"listen: {}\n", "listen has no value"},
        WrongFile{"model:\n  dtype: float16\n",
                  "model.dtype is \"float16\", but must be one of auto, float32"},
        WrongFile{"model:\n  dtype: bloat16\n", "did you mean bfloat16?"},
        WrongFile{"offload:\n  slots: two\n",
                  "c.yaml:2: offload.slots is \"two\", but must be a whole number"},
        WrongFile{"offload:\n  slots: 2.0\n", "is \"2.0\""},
        WrongFile{"offload:\n  slots: 0x3\n", "is \"0x3\""},
        WrongFile{"offload:\n  slots: 1\n", "from 2 to 16"},
        WrongFile{"offload:\n  slots: 99999999999999999999\n", "from 2 to 16"},
        WrongFile{"offload:\n  slots: \"3\"\n", "is the string \"3\""},
        WrongFile{"offload:\n  eager: yes\n", "is \"yes\", but must be true or false"},
        WrongFile{"offload:\n  budget: 5 apples\n", "\"5 apples\" is not a size"},
        WrongFile{"grace: 5\n", "\"5\" is not a duration"},
        WrongFile{"data_dir: ''\n", "but must be a path"},
        WrongFile{"[]\n", "must hold a mapping of keys, not a list"},
        WrongFile{"hello\n", "must hold a mapping of keys, not \"hello\""},
        WrongFile{"[a]: b\n", "a key must not be a list"},
        WrongFile{"{a: b}: c\n", "a key must not be a mapping"},
        WrongFile{"'': b\n", "a key is empty"}, WrongFile{"? ~\n: b\n", "a key is empty"},
        WrongFile{"listen: &x a\n", "anchors are not supported"}, WrongFile{"a: &x [*x, *x]\n", ""},
        WrongFile{"listen: *x\n", ""}, WrongFile{"listen: !!str a\n", "the tag"},
        WrongFile{"model: !foo {path: a}\n", "the tag"},
        WrongFile{"listen: a\n---\nlisten: b\n", "a second document"},
        WrongFile{"listen: \"a\n", "one line without blanks around it"},
        WrongFile{"listen: |\n  a\n  b\n", "one line"},
        WrongFile{"listen: \"a\\x07\"\n", "is \"a\\x07\", but must be one line"},
        WrongFile{"listen: a: b\n", "not valid YAML"}, WrongFile{"\tlisten: a\n", "c.yaml:1"},
        WrongFile{"listen: {a\n", "not valid YAML"},
        WrongFile{"%YAML 9.9\n---\nlisten: a\n", "c.yaml:1"},
        WrongFile{"a: {b: {c: {d: {e: {f: {g: {h: {i: {j: {k: {l: {m: {n: {o: {p: {q: {r: "
                  "1}}}}}}}}}}}}}}}}}}\n",
                  "nested more than 16"}));

TEST(ConfigTest, HostileFilesAreErrors) {
  const auto repeated = [](const std::string& text, size_t times) {
    std::string out;
    while (times-- > 0) out += text;
    return out;
  };
  std::string laughs = "a: &a [x, x]\n";
  for (char c = 'b'; c < 'z'; ++c) {
    laughs += std::string(1, c) + ": &" + c + " [*" + static_cast<char>(c - 1) + ", *" +
              static_cast<char>(c - 1) + "]\n";
  }
  for (const std::string& text :
       {laughs, repeated("[", 60000), repeated("{", 60000), repeated("- ", 30000),
        repeated("? ", 30000), repeated("{a: ", 15000), repeated("[{", 30000), repeated("!", 60000),
        repeated("&a ", 20000), repeated("\"", 60001), std::string(70000, 'a'),
        "a: " + std::string(60000, '\0'), std::string("\xff\xfe\x00", 3),
        std::string("\xff\xff\xff\xff")}) {
    const absl::Status status = LoadText(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text.substr(0, 20);
    EXPECT_THAT(status.message(), HasSubstr("c.yaml"));
  }
}

TEST(ConfigTest, MissingAndUnreadableFilesAreErrors) {
  EXPECT_EQ(Config::Load(Schema(), {.file = "/nowhere/c.yaml"}).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(Config::Load(Schema(), {.file = "/tmp"}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Config::Load(Schema(), {.file = "/dev/zero"}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ConfigTest, EveryErrorIsReportedAtOnce) {
  const ConfigFile file("offload: {slots: x}\nmodle: {path: y}\n");
  const absl::Status status = Config::Load(Schema(), {.file = file.path(),
                                                      .environment = {{"DLO_GRACE", "soon"}},
                                                      .flags = {{"--dtype", "int8"}}})
                                  .status();
  EXPECT_THAT(status.message(), AllOf(HasSubstr("offload.slots is \"x\""), HasSubstr("modle.path"),
                                      HasSubstr("the environment variable DLO_GRACE"),
                                      HasSubstr("--dtype is \"int8\"")));
}

TEST(ConfigTest, UnknownVariablesOfOursAreRefused) {
  const absl::Status status =
      Config::Load(Schema(), {.environment = {{"DLO_OFLOAD_SLOTS", "2"}}}).status();
  EXPECT_THAT(status.message(), HasSubstr("\"DLO_OFLOAD_SLOTS\"; did you mean DLO_OFFLOAD_SLOTS?"));
  EXPECT_TRUE(Config::Load(Schema(), {.environment = {{"DLO_OTHER", "2"}, {"PATH", "x"}},
                                      .other_environment = {"DLO_OTHER"}})
                  .ok());
}

TEST(ConfigTest, TheDumpSaysWhereValuesCameFromAndLoadsAgain) {
  const std::string awkward = "a \"b\" \\ # c: \xc3\xa9";
  const ConfigSources sources = {
      .environment = {{"DLO_MODEL_PATH", awkward}, {"DLO_LISTEN", "unix:/a b"}},
      .flags = {{"--budget", "1536MiB"}, {"--data-dir", "/x/../y"}}};
  const absl::StatusOr<Config> config = Config::Load(Schema(), sources);
  ASSERT_TRUE(config.ok()) << config.status();
  const std::string dump = config->Dump();
  EXPECT_THAT(dump, HasSubstr("model:\n  path: \""));
  EXPECT_THAT(dump, HasSubstr("\"  # env DLO_MODEL_PATH\n"));
  EXPECT_THAT(dump, HasSubstr("\n  slots: 2  # default\n  budget: 1536MiB  # flag --budget\n"));
  EXPECT_THAT(dump, HasSubstr("\ndata_dir: /y  # flag --data-dir\n"));

  const ConfigFile file(dump);
  const absl::StatusOr<Config> again = Config::Load(Schema(), {.file = file.path()});
  ASSERT_TRUE(again.ok()) << again.status() << dump;
  for (const ConfigKey& key : Schema()) EXPECT_FALSE(again->IsDefault(key.key)) << key.key;
  EXPECT_EQ(again->PathOrName("model.path"), awkward);
  EXPECT_EQ(again->String("listen"), "unix:/a b");
  EXPECT_EQ(again->Bytes("offload.budget"), 1536ll << 20);
  EXPECT_EQ(again->Duration("grace"), absl::Minutes(5));
}

TEST(ConfigTest, StringsThatYamlWouldReadOtherwiseSurviveTheDump) {
  for (const char* text :
       {"",     "~",    "null", "true", "123", "1e3", "- a", "a: b", "#x", "x #y",
        "[a]",  "{a",   "'q'",  "*a",   "&a",  "!a",  "%a",  "@a",   "a:", ":a",
        "0x10", "a  b", "\\n",  "=",    "<<",  "?",   "|",   ">"}) {
    const absl::StatusOr<Config> config = Config::Load(Schema(), {.flags = {{"--listen", text}}});
    const absl::StatusOr<Config> again = LoadText(config->Dump());
    ASSERT_TRUE(again.ok()) << text << again.status();
    EXPECT_EQ(again->String("listen"), text);
  }
}

TEST(ConfigTest, NearestNameIsSilentWhenNothingIsNear) {
  const std::vector<std::string> names = {"listen", "model.path", "offload.slots"};
  const std::vector<std::pair<const char*, const char*>> cases = {{"lisen", "listen"},
                                                                  {"lsiten", "listen"},
                                                                  {"path", "model.path"},
                                                                  {"Listen", "listen"},
                                                                  {"offload.slot", "offload.slots"},
                                                                  {"x", ""},
                                                                  {"temperature", ""},
                                                                  {"", ""}};
  for (const auto& [unknown, nearest] : cases)
    EXPECT_EQ(NearestName(unknown, names), nearest) << unknown;
}

TEST(ConfigTest, EnvironmentIsSplitAtTheFirstEqualsSign) {
  const char* const variables[] = {"A=b=c", "B=", "C", nullptr};
  const std::map<std::string, std::string> environment = EnvironmentOf(variables);
  EXPECT_EQ(environment.at("A"), "b=c");
  EXPECT_EQ(environment.at("B"), "");
  EXPECT_TRUE(EnvironmentOf(nullptr).empty());
}

}  // namespace
}  // namespace dlo
