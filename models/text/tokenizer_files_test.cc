// Tokenizer files that are broken, hostile or unusual.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "models/text/spiece_model.pb.h"
#include "models/text/t5_tokenizer.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const fs::path kShapes = fs::path(DLO_SOURCE_DIR) / "assets/shapes/tokenizer";
const char kMark[] = "\xE2\x96\x81";

// Pieces: 0 <pad>, 1 </s>, 2 <unk>, 3 ▁, 4 ▁a, 5 b, 6 ▁ab.
json SmallTokenizer() {
  return json::parse(R"({
    "version": "1.0",
    "added_tokens": [
      {"id": 1, "content": "</s>", "normalized": false, "special": true},
      {"id": 7, "content": "<extra_id_0>", "normalized": false, "special": true}],
    "normalizer": {"type": "Sequence", "normalizers": [
      {"type": "NFKC"},
      {"type": "Strip", "strip_left": true, "strip_right": true},
      {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
      {"type": "WhitespaceSplit"},
      {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": true}]},
    "post_processor": {
      "type": "TemplateProcessing",
      "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
      "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}},
    "model": {
      "type": "Unigram", "unk_id": 2, "byte_fallback": false,
      "vocab": [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["\u2581", -2.0], ["\u2581a", -3.0],
                ["b", -4], ["\u2581ab", -5.5]]}
  })");
}

spiece::Model SmallSpieceModel() {
  spiece::Model model;
  auto add = [&](const std::string& text, float score, spiece::PieceType type) {
    spiece::Piece* piece = model.add_pieces();
    piece->set_text(text);
    piece->set_score(score);
    piece->set_type(type);
  };
  add("<pad>", 0, spiece::CONTROL);
  add("</s>", 0, spiece::CONTROL);
  add("<unk>", 0, spiece::UNKNOWN);
  add(kMark, -2, spiece::NORMAL);
  add(absl::StrCat(kMark, "a"), -3, spiece::NORMAL);
  add("[x]", 0, spiece::USER_DEFINED);
  return model;
}

class TokenizerFiles : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::path(testing::TempDir()) /
           absl::StrCat("dlo_tokenizer_",
                        testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(dir_);
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }

  void Write(const std::string& name, const std::string& bytes) {
    std::ofstream(dir_ / name, std::ios::binary) << bytes;
  }

  std::vector<int64_t> Ids(const std::string& text, int max_length = 512) {
    auto tokenizer = T5Tokenizer::Load(dir_);
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    return tokenizer.ok() ? (*tokenizer)->Encode(text, max_length) : std::vector<int64_t>{};
  }

  std::string Error() {
    const absl::Status status = T5Tokenizer::Load(dir_).status();
    EXPECT_FALSE(status.ok());
    return status.ToString();
  }

  // The error of the small tokenizer after `change`.
  std::string ErrorAfter(const std::function<void(json&)>& change) {
    json document = SmallTokenizer();
    change(document);
    Write("tokenizer.json", document.dump());
    return Error();
  }

  fs::path dir_;
};

TEST_F(TokenizerFiles, EncodesAndCutsAtTheLengthWithTheEndOfText) {
  Write("tokenizer.json", SmallTokenizer().dump());
  EXPECT_THAT(Ids("ab a"), ElementsAre(6, 4, 1));
  EXPECT_THAT(Ids("ab a", 3), ElementsAre(6, 4, 1));
  EXPECT_THAT(Ids("ab a", 2), ElementsAre(6, 1));
  EXPECT_THAT(Ids("ab a", 1), ElementsAre(1));
  EXPECT_THAT(Ids("ab a", 0), ElementsAre(1));
  EXPECT_THAT(Ids("ab a", -5), ElementsAre(1));
  EXPECT_THAT(Ids(""), ElementsAre(1));
  EXPECT_THAT(Ids(" \n "), ElementsAre(1));
  EXPECT_THAT(Ids("a<extra_id_0></s>b"), ElementsAre(4, 7, 1, 3, 5, 1));
  EXPECT_THAT(Ids("<extra_id_0><extra_id_0>", 2), ElementsAre(7, 1));
}

TEST_F(TokenizerFiles, UnknownNeighboursAreOneUnknownPiece) {
  Write("tokenizer.json", SmallTokenizer().dump());
  EXPECT_THAT(Ids("xyz b"), ElementsAre(3, 2, 3, 5, 1));
}

TEST_F(TokenizerFiles, BytesThatAreNotUtf8AreReplacementCharacters) {
  Write("tokenizer.json", SmallTokenizer().dump());
  EXPECT_EQ(Ids("a\xFF\xC3 b\xE2\x96"), Ids("a\uFFFD\uFFFD b\uFFFD\uFFFD"));
  EXPECT_THAT(Ids(std::string("a\0b", 3)), ElementsAre(4, 2, 5, 1));
}

TEST_F(TokenizerFiles, ByteFallbackNeedsEveryByteOfTheCharacter) {
  json document = SmallTokenizer();
  document["model"]["byte_fallback"] = true;
  document["model"]["vocab"].push_back(json::array({"<0xC3>", 0.0}));
  document["added_tokens"].erase(1);
  Write("tokenizer.json", document.dump());
  EXPECT_THAT(Ids("é"), ElementsAre(3, 2, 1));
  document["model"]["vocab"].push_back(json::array({"<0xA9>", 0.0}));
  Write("tokenizer.json", document.dump());
  EXPECT_THAT(Ids("é"), ElementsAre(3, 7, 8, 1));
}

TEST_F(TokenizerFiles, OfPiecesGivenTwiceTheLastCounts) {
  json document = SmallTokenizer();
  document["model"]["vocab"].push_back(json::array({"b", -1.0}));
  document["added_tokens"].erase(1);
  Write("tokenizer.json", document.dump());
  EXPECT_THAT(Ids("b"), ElementsAre(3, 7, 1));
}

TEST_F(TokenizerFiles, OlderFilesSayAddPrefixSpace) {
  json document = SmallTokenizer();
  document["pre_tokenizer"] = {{"type", "Metaspace"}, {"add_prefix_space", false}};
  Write("tokenizer.json", document.dump());
  EXPECT_THAT(Ids("b b"), ElementsAre(5, 3, 5, 1));
}

TEST_F(TokenizerFiles, VocabularySizeCountsEveryIdThatCanCome) {
  Write("tokenizer.json", SmallTokenizer().dump());
  auto tokenizer = T5Tokenizer::Load(dir_);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->vocab_size(), 8);
  EXPECT_EQ((*tokenizer)->eos_id(), 1);
  json document = SmallTokenizer();
  document["post_processor"]["special_tokens"]["</s>"]["ids"] = {20};
  Write("tokenizer.json", document.dump());
  EXPECT_EQ((*T5Tokenizer::Load(dir_))->vocab_size(), 21);
}

TEST_F(TokenizerFiles, WithoutAPostProcessorTheTextEndsWithTheEndToken) {
  json document = SmallTokenizer();
  document["post_processor"] = nullptr;
  Write("tokenizer.json", document.dump());
  EXPECT_THAT(Ids("a"), ElementsAre(4, 1));
}

TEST_F(TokenizerFiles, SpieceModelAloneHasItsControlAndUserTokens) {
  Write("spiece.model", SmallSpieceModel().SerializeAsString());
  EXPECT_THAT(Ids("a</s>[x]a<pad>"), ElementsAre(4, 1, 5, 4, 0, 1));
}

TEST_F(TokenizerFiles, SpieceModelTakesSentinelsFromTheFilesBesideIt) {
  Write("spiece.model", SmallSpieceModel().SerializeAsString());
  Write("special_tokens_map.json",
        R"({"eos_token": {"content": "</s>"},
            "additional_special_tokens": ["<extra_id_0>", "<extra_id_1>", "<extra_id_2>"]})");
  EXPECT_THAT(Ids("a <extra_id_0> <extra_id_2>"), ElementsAre(4, 8, 6, 1));
  Write("special_tokens_map.json", "{}");
  Write("tokenizer_config.json",
        R"({"eos_token": "<pad>", "added_tokens_decoder":
            {"9": {"content": "<extra_id_0>", "special": true}}})");
  EXPECT_THAT(Ids("a <extra_id_0>"), ElementsAre(4, 9, 0));
}

TEST_F(TokenizerFiles, MissingFilesAreNamed) {
  EXPECT_THAT(Error(), AllOf(HasSubstr("NOT_FOUND"), HasSubstr(dir_.string()),
                             HasSubstr("tokenizer.json"), HasSubstr("spiece.model")));
  fs::create_directory(dir_ / "tokenizer.json");
  EXPECT_THAT(Error(), HasSubstr("is not a regular file"));
}

TEST_F(TokenizerFiles, BrokenJsonIsAnErrorWithFileAndPlace) {
  Write("tokenizer.json", "{\"model\": {\"vocab\": [[");
  EXPECT_THAT(Error(), AllOf(HasSubstr("tokenizer.json"), HasSubstr("line 1")));
  Write("tokenizer.json", "");
  EXPECT_THAT(Error(), HasSubstr("tokenizer.json"));
  Write("tokenizer.json", "[]");
  EXPECT_THAT(Error(), HasSubstr("the file is [], but must be an object"));
  Write("tokenizer.json", std::string(100000, '['));
  EXPECT_THAT(Error(), HasSubstr("tokenizer.json"));
}

TEST_F(TokenizerFiles, WrongValuesAreErrorsWithFileKeyAndValue) {
  const struct {
    const char* pointer;
    json value;
    std::vector<const char*> message;
  } kCases[] = {
      {"/model", nullptr, {"model is missing"}},
      {"/model/type", "BPE", {"UNIMPLEMENTED", "model is a model of type \"BPE\"", "Unigram"}},
      {"/model/vocab", nullptr, {"model.vocab is missing"}},
      {"/model/vocab", json::object(), {"model.vocab is {}", "list"}},
      {"/model/vocab", json::array(), {"vocabulary has 0 pieces"}},
      {"/model/vocab/3", "x", {"model.vocab[3] is \"x\"", "[piece, score]"}},
      {"/model/vocab/3", {"x", "1"}, {"model.vocab[3] is [\"x\",\"1\"]"}},
      {"/model/vocab/3/0", "", {"piece 3", "is empty"}},
      {"/model/unk_id", nullptr, {"model.unk_id is missing"}},
      {"/model/unk_id", 7, {"unk_id is 7", "7 pieces"}},
      {"/model/unk_id", -1, {"model.unk_id is -1", "integer"}},
      {"/model/unk_id", 1e30, {"model.unk_id is 1e+30"}},
      {"/model/byte_fallback", "yes", {"model.byte_fallback is \"yes\"", "true or false"}},
      {"/normalizer", "x", {"normalizer is \"x\"", "object"}},
      {"/normalizer/type", "Lowercase", {"UNIMPLEMENTED", "normalizer", "\"Lowercase\""}},
      {"/normalizer/normalizers/0/type", 3, {"normalizer.normalizers[0].type is 3"}},
      {"/normalizer/normalizers/0",
       {{"type", "Precompiled"}, {"precompiled_charsmap", "!!!"}},
       {"precompiled_charsmap is \"!!!\"", "base64"}},
      {"/normalizer/normalizers/0",
       {{"type", "Precompiled"}, {"precompiled_charsmap", "AAA="}},
       {"precompiled_charsmap", "too few"}},
      {"/normalizer/normalizers/0",
       {{"type", "Precompiled"}, {"precompiled_charsmap", "/////w=="}},
       {"precompiled_charsmap", "4294967295"}},
      {"/normalizer/normalizers/2/pattern",
       {{"Regex", "\\s+"}},
       {"UNIMPLEMENTED", "pattern.Regex"}},
      {"/normalizer/normalizers/2/pattern", {{"String", ""}}, {"pattern", "not empty"}},
      {"/pre_tokenizer/type", "ByteLevel", {"UNIMPLEMENTED", "\"ByteLevel\""}},
      {"/pre_tokenizer/pretokenizers/1/replacement", "", {"replacement is \"\"", "one character"}},
      {"/pre_tokenizer/pretokenizers/1/prepend_scheme", "often", {"prepend_scheme is \"often\""}},
      {"/added_tokens", 3, {"added_tokens is 3", "list"}},
      {"/added_tokens/1/id", "7", {"added_tokens[1].id is \"7\""}},
      {"/added_tokens/1/id", 1 << 30, {"added_tokens[1].id is 1073741824"}},
      {"/added_tokens/1/id", 5, {"added_tokens[1]", "<extra_id_0>", "id 5", "another piece"}},
      {"/added_tokens/0/id", 2, {"added_tokens[0]", "</s>", "id 2", "id 1"}},
      {"/added_tokens/1/content", nullptr, {"added_tokens[1].content is missing"}},
      {"/post_processor/type", "BertProcessing", {"UNIMPLEMENTED", "BertProcessing"}},
      {"/post_processor/single", json::array(), {"post_processor.single is []"}},
      {"/post_processor/special_tokens", json::object(), {"special_tokens.</s> is missing"}},
      {"/post_processor/special_tokens/<~1s>/ids", json::array(), {"single", "end-of-text"}},
  };
  for (const auto& one : kCases) {
    SCOPED_TRACE(absl::StrCat(one.pointer, " = ", one.value.dump()));
    const std::string error =
        ErrorAfter([&](json& document) { document[json::json_pointer(one.pointer)] = one.value; });
    EXPECT_THAT(error, HasSubstr((dir_ / "tokenizer.json").string()));
    for (const char* part : one.message) EXPECT_THAT(error, HasSubstr(part));
  }
}

TEST_F(TokenizerFiles, AnyValueInAnyPlaceLoadsOrIsAnErrorWithTheFile) {
  const json original = SmallTokenizer();
  const std::vector<json> replacements = {nullptr,
                                          true,
                                          -1,
                                          3,
                                          1e300,
                                          "",
                                          "x",
                                          "</s>",
                                          json::array(),
                                          json::array({1, "x"}),
                                          json::object(),
                                          json{{"type", "Sequence"}},
                                          json{{"type", "Precompiled"}}};
  int loaded = 0;
  int refused = 0;
  const json leaves = original.flatten();
  for (const auto& [pointer, unused] : leaves.items()) {
    // The value itself and everything around it.
    for (json::json_pointer place(pointer); !place.empty(); place.pop_back()) {
      for (const json& replacement : replacements) {
        json document = original;
        document[place] = replacement;
        auto spec = ParseTokenizerJson(document, "dir/tokenizer.json");
        if (spec.ok()) {
          ++loaded;
          T5Tokenizer(*std::move(spec)).Encode("a </s> b<extra_id_0>  \u00e9", 16);
        } else {
          ++refused;
          EXPECT_THAT(std::string(spec.status().message()), HasSubstr("dir/tokenizer.json: "));
        }
      }
    }
  }
  EXPECT_GT(loaded, 100);
  EXPECT_GT(refused, 1000);
}

TEST_F(TokenizerFiles, WrongSpieceModelsAreErrorsWithTheFile) {
  auto error_after = [&](const std::function<void(spiece::Model&)>& change) {
    spiece::Model model = SmallSpieceModel();
    change(model);
    Write("spiece.model", model.SerializeAsString());
    const std::string error = Error();
    EXPECT_THAT(error, HasSubstr((dir_ / "spiece.model").string()));
    return error;
  };
  EXPECT_THAT(error_after([](auto& m) { m.clear_pieces(); }), HasSubstr("no piece is the unknown"));
  EXPECT_THAT(error_after([](auto& m) { m.mutable_pieces(4)->set_type(spiece::UNKNOWN); }),
              HasSubstr("pieces 2 and 4 are both the unknown piece"));
  EXPECT_THAT(error_after([](auto& m) { m.mutable_pieces(4)->set_text("a\xFF"); }),
              AllOf(HasSubstr("piece 4"), HasSubstr("not UTF-8")));
  EXPECT_THAT(error_after([](auto& m) { m.mutable_pieces(4)->clear_text(); }),
              HasSubstr("piece 4 of the vocabulary is empty"));
  EXPECT_THAT(error_after([](auto& m) { m.mutable_pieces(4)->set_score(NAN); }),
              HasSubstr("piece 4 of the vocabulary has the score nan"));
  EXPECT_THAT(error_after([](auto& m) { m.mutable_trainer()->set_model_type(2); }),
              HasSubstr("model_type is 2"));
  EXPECT_THAT(error_after([](auto& m) { m.mutable_pieces(1)->set_text("<end>"); }),
              HasSubstr("end-of-text token \"</s>\""));
  EXPECT_THAT(
      error_after([](auto& m) { m.mutable_normalizer()->set_precompiled_charsmap("\xFF\xFF"); }),
      HasSubstr("precompiled_charsmap"));
  Write("spiece.model", "\xFF\xFF\xFFnothing of the kind");
  EXPECT_THAT(Error(), HasSubstr("not a SentencePiece model"));
  Write("spiece.model", SmallSpieceModel().SerializeAsString());
  Write("special_tokens_map.json", R"({"pad_token": "<nowhere>"})");
  EXPECT_THAT(Error(), AllOf(HasSubstr("special_tokens_map.json"), HasSubstr("<nowhere>")));
}

TEST_F(TokenizerFiles, DamagedSpieceModelsNeverCrash) {
  std::ifstream file(kShapes / "spiece.model", std::ios::binary);
  const std::string original((std::istreambuf_iterator<char>(file)), {});
  ASSERT_GT(original.size(), 1000U);
  std::mt19937 random(5);
  int loaded = 0;
  for (int round = 0; round < 150; ++round) {
    std::string damaged = original;
    if (round % 5 == 0) damaged.resize(random() % damaged.size());
    for (unsigned i = 0; i < 1 + random() % 40 && !damaged.empty(); ++i) {
      damaged[random() % damaged.size()] = static_cast<char>(random());
    }
    Write("spiece.model", damaged);
    auto tokenizer = T5Tokenizer::Load(dir_);
    if (!tokenizer.ok()) continue;
    ++loaded;
    (*tokenizer)->Encode("a green triangle \uFF21\uFF22 \u00BD e\u0301 \u1E9B\u0323 \uAC00", 64);
  }
  EXPECT_GT(loaded, 20) << "the damage should mostly hit the rules of normalisation";
}

TEST_F(TokenizerFiles, HostileNormalisationRulesNeverCrash) {
  // Units that point anywhere: labels for every byte, values and offsets out of range.
  std::mt19937 random(6);
  std::string text;
  for (int c = 1; c < 0x3000; c += 7) AppendUtf8(static_cast<char32_t>(c), text);
  for (int round = 0; round < 200; ++round) {
    const uint32_t units = 1 + random() % 600;
    std::string blob;
    auto put = [&](uint32_t value) {
      for (int i = 0; i < 4; ++i) blob.push_back(static_cast<char>(value >> (8 * i)));
    };
    put(units * 4);
    for (uint32_t i = 0; i < units; ++i) {
      // Low bits as label, value flag set, a small offset now and then.
      put(static_cast<uint32_t>((i & 0xFF) | 0x100 |
                                (random() % 3 == 0 ? random() << 9 : (random() % 700) << 10)));
    }
    blob.append("abc\0de", 6);
    auto map = Charsmap::Parse(blob);
    ASSERT_TRUE(map.ok()) << map.status();
    map->Normalize(text);
  }
}

}  // namespace
}  // namespace dlo
