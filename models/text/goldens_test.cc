// What tools/make_tokenizer_goldens.py recorded of diffusers' prompt_clean and of the tokenizers
// library, against ours.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "absl/strings/escaping.h"
#include "base/json.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "models/text/prompt_clean.h"
#include "models/text/t5_tokenizer.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const fs::path kGoldens = fs::path(DLO_SOURCE_DIR) / "tests/goldens/tokenizer";
const fs::path kShapes = fs::path(DLO_SOURCE_DIR) / "assets/shapes/tokenizer";

// Texts that are cleaned differently, and why. Each must really differ.
const std::map<std::string, std::string>& CleaningExceptions() {
  static const auto& exceptions = *new std::map<std::string, std::string>{
      {"cafÃ© au lait", "ftfy repairs mojibake, CleanPrompt does not"},
      {"â€œquotedâ€\xC2\x9D", "ftfy repairs mojibake, CleanPrompt does not"},
  };
  return exceptions;
}

// The same for ids, by golden: texts whose ids are not those of the tokenizers library.
const std::map<std::string, std::string>& IdExceptions(const std::string& golden) {
  static const auto& none = *new std::map<std::string, std::string>;
  static const auto& flags = *new std::map<std::string, std::string>{
      {"ⅷ Ⅻ ① ㋿ ㌀", "the library's NFKC, which T5 does not use, is older than U+32FF"},
  };
  return golden == "flags" ? flags : none;
}

json ReadGolden(const fs::path& path) {
  auto document = ReadJsonFile(path);
  EXPECT_TRUE(document.ok()) << document.status();
  return document.ok() ? *document : json::object();
}

const json& Golden() {
  static const json& golden = *new json(ReadGolden(kGoldens / "cases.json"));
  return golden;
}

fs::path FreshDir(const std::string& name) {
  const fs::path dir = fs::path(testing::TempDir()) / ("dlo_text_goldens_" + name);
  fs::remove_all(dir);
  fs::create_directories(dir);
  return dir;
}

// Encodes every text of the goldens, as given and cleaned, with the tokenizer of `dir`.
void ExpectIds(const fs::path& dir, const std::string& name) {
  auto tokenizer = T5Tokenizer::Load(dir);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const int max_length = Golden().at("max_length");
  size_t exceptions = 0;
  for (const json& one : Golden().at("cases")) {
    const std::string text = one.at("text");
    const std::string cleaned = one.at("cleaned");
    SCOPED_TRACE(absl::CHexEscape(text));
    const auto raw = one.at(name).at("raw").get<std::vector<int64_t>>();
    const auto clean = one.at(name).at("clean").get<std::vector<int64_t>>();
    if (IdExceptions(name).count(text) != 0) {
      ++exceptions;
      EXPECT_NE((*tokenizer)->Encode(text, max_length), raw)
          << "no exception any more: take it off the list";
    } else {
      EXPECT_EQ((*tokenizer)->Encode(text, max_length), raw);
      EXPECT_EQ((*tokenizer)->Encode(cleaned, max_length), clean);
    }
  }
  EXPECT_EQ(exceptions, IdExceptions(name).size()) << "an exception without a golden";
}

TEST(TokenizerGoldens, AreMany) {
  EXPECT_GE(Golden().at("cases").size(), 200U);
  const auto& cases = Golden().at("cases");
  EXPECT_TRUE(std::any_of(cases.begin(), cases.end(), [](const json& one) {
    return one.at("bytes").at("raw").size() == one.at("bytes").at("clean").size() &&
           one.at("bytes").at("raw").size() == Golden().at("max_length");
  })) << "no text is long enough to be cut";
}

TEST(TokenizerGoldens, PromptsAreCleanedAsByDiffusers) {
  size_t exceptions = 0;
  for (const json& one : Golden().at("cases")) {
    const std::string text = one.at("text");
    const std::string cleaned = one.at("cleaned");
    SCOPED_TRACE(absl::CHexEscape(text));
    if (CleaningExceptions().count(text) != 0) {
      ++exceptions;
      EXPECT_NE(CleanPrompt(text), cleaned) << "no exception any more: take it off the list";
    } else {
      EXPECT_EQ(CleanPrompt(text), cleaned);
    }
  }
  EXPECT_EQ(exceptions, CleaningExceptions().size()) << "an exception without a golden";
}

TEST(TokenizerGoldens, IdsOfTheDemoModelFromTokenizerJson) {
  const fs::path dir = FreshDir("json_only");
  fs::copy_file(kShapes / "tokenizer.json", dir / "tokenizer.json");
  ExpectIds(dir, "shapes");
}

TEST(TokenizerGoldens, IdsOfTheDemoModelFromItsWholeFolder) { ExpectIds(kShapes, "shapes"); }

TEST(TokenizerGoldens, IdsOfTheDemoModelFromSpieceModel) {
  const fs::path dir = FreshDir("spiece");
  for (const char* file : {"spiece.model", "special_tokens_map.json", "tokenizer_config.json"}) {
    fs::copy_file(kShapes / file, dir / file);
  }
  ExpectIds(dir, "shapes");
}

TEST(TokenizerGoldens, IdsWithByteFallbackAndSentinels) { ExpectIds(kGoldens / "bytes", "bytes"); }

TEST(TokenizerGoldens, IdsWithAddedTokensOfEveryKind) {
  const fs::path dir = FreshDir("flags");
  json document = ReadGolden(kGoldens / "bytes/tokenizer.json");
  document.update(ReadGolden(kGoldens / "flags.json"));
  std::ofstream(dir / "tokenizer.json") << document.dump();
  ExpectIds(dir, "flags");
}

}  // namespace
}  // namespace dlo
