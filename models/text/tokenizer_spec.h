// What the files of a T5 tokenizer say, read and checked, whichever of them there are.
//
//   ASSIGN_OR_RETURN(TokenizerSpec spec, ReadTokenizerSpec("model/tokenizer"));
//
// tokenizer.json, where there is one, says everything (the steps of the tokenizers library). Else
// spiece.model gives vocabulary and normalisation, and tokenizer_config.json and
// special_tokens_map.json the added tokens; the steps between are those that transformers gives a
// T5 tokenizer.
//
// Errors name file, key and value. NOT_FOUND where neither file is there, INVALID_ARGUMENT where
// what a file says is wrong, UNIMPLEMENTED where it asks for a step that is not known here.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "models/text/added_tokens.h"
#include "models/text/charsmap.h"
#include "models/text/unicode.h"
#include "models/text/unigram.h"
#include "nlohmann/json.hpp"

namespace dlo {

struct StripStep {
  bool left = false;
  bool right = false;
};

struct ReplaceStep {
  std::string pattern;  // not empty
  size_t run_min = 0;   // 0: each occurrence of the pattern; else each run of at least so many
  std::string content;
};

using NormalizerStep = std::variant<Charsmap, StripStep, ReplaceStep, NormalForm>;

struct WhiteSpaceStep {};

// Blanks become `mark`, a word gets one before it, and words are cut before each mark.
struct MetaspaceStep {
  enum class Prepend { kAlways, kFirst, kNever };
  std::string mark = "\xE2\x96\x81";
  Prepend prepend = Prepend::kAlways;
  bool split = true;
};

using PreTokenizerStep = std::variant<WhiteSpaceStep, MetaspaceStep>;

struct TokenizerSpec {
  UnigramModel model;
  std::vector<NormalizerStep> normalizers;
  std::vector<PreTokenizerStep> pre_tokenizers;
  std::vector<AddedToken> added_tokens;
  std::vector<int64_t> prefix_ids;  // before the pieces of every text
  std::vector<int64_t> suffix_ids;  // after them; for T5 the one id of </s>
};

absl::StatusOr<TokenizerSpec> ReadTokenizerSpec(const std::filesystem::path& tokenizer_dir);

// `source` names the file in errors.
absl::StatusOr<TokenizerSpec> ParseTokenizerJson(const nlohmann::json& json,
                                                 absl::string_view source);

}  // namespace dlo
