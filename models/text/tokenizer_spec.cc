#include "models/text/tokenizer_spec.h"

#include <fstream>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "models/text/spiece_model.pb.h"

namespace dlo {
namespace {

using nlohmann::json;

// Bounds of what an embedding table could have; a file beyond them is broken, and is not to cost
// gigabytes.
constexpr int64_t kIdMax = (int64_t{1} << 24) - 1;
constexpr size_t kSpieceBytesMax = size_t{64} << 20;
constexpr int kStepDepthMax = 8;

// A value of a JSON file and the way to it, for messages.
struct Place {
  const json* value;
  std::string source;  // the file
  std::string path;    // "model.vocab", empty for the whole

  absl::Status Wrong(absl::string_view must) const {
    return absl::InvalidArgumentError(absl::StrCat(source, ": ", path.empty() ? "the file" : path,
                                                   " is ", JsonExcerpt(*value), ", but must be ",
                                                   must));
  }

  std::string Sub(absl::string_view key) const {
    return path.empty() ? std::string(key) : absl::StrCat(path, ".", key);
  }

  // The member, or nothing where it is missing or null.
  absl::StatusOr<std::optional<Place>> Find(const std::string& key) const {
    if (!value->is_object()) return Wrong("an object");
    const auto found = value->find(key);
    if (found == value->end() || found->is_null()) return std::nullopt;
    return Place{&*found, source, Sub(key)};
  }

  absl::StatusOr<Place> At(const std::string& key) const {
    ASSIGN_OR_RETURN(std::optional<Place> member, Find(key));
    if (!member) {
      return absl::InvalidArgumentError(absl::StrCat(source, ": ", Sub(key), " is missing"));
    }
    return *member;
  }

  absl::StatusOr<std::vector<Place>> List() const {
    if (!value->is_array()) return Wrong("a list");
    std::vector<Place> places;
    places.reserve(value->size());
    for (size_t i = 0; i < value->size(); ++i) {
      places.push_back({&(*value)[i], source, absl::StrCat(path, "[", i, "]")});
    }
    return places;
  }

  absl::StatusOr<std::string> String() const {
    if (!value->is_string()) return Wrong("a string");
    return value->get<std::string>();
  }

  absl::StatusOr<int64_t> Id() const {
    const bool fits = value->is_number_integer() &&
                      (value->is_number_unsigned()
                           ? value->get<uint64_t>() <= static_cast<uint64_t>(kIdMax)
                           : value->get<int64_t>() >= 0 && value->get<int64_t>() <= kIdMax);
    if (!fits) return Wrong(absl::StrCat("an integer from 0 to ", kIdMax));
    return value->get<int64_t>();
  }

  absl::StatusOr<std::string> StringAt(const std::string& key) const {
    ASSIGN_OR_RETURN(Place member, At(key));
    return member.String();
  }

  absl::StatusOr<bool> BoolAt(const std::string& key, bool missing) const {
    ASSIGN_OR_RETURN(std::optional<Place> member, Find(key));
    if (!member) return missing;
    if (!member->value->is_boolean()) return member->Wrong("true or false");
    return member->value->get<bool>();
  }

  absl::Status Unknown(absl::string_view what, absl::string_view type,
                       absl::string_view known) const {
    return absl::UnimplementedError(absl::StrCat(source, ": ", path, " is a ", what, " of type \"",
                                                 absl::CHexEscape(type), "\"; known are ", known));
  }
};

// Puts file and place before what an inner part says of its data.
absl::Status Within(const Place& place, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat(place.source, ": ", place.path, ": ", status.message()));
}

absl::StatusOr<UnigramModel> ParseModel(const Place& place) {
  // A file of an old version of the library may leave the type out.
  ASSIGN_OR_RETURN(std::optional<Place> type_place, place.Find("type"));
  if (type_place) {
    ASSIGN_OR_RETURN(std::string type, type_place->String());
    if (type != "Unigram") return place.Unknown("model", type, "Unigram");
  }
  ASSIGN_OR_RETURN(Place vocab, place.At("vocab"));
  if (!vocab.value->is_array()) return vocab.Wrong("a list of [piece, score]");
  std::vector<UnigramModel::Piece> pieces;
  pieces.reserve(vocab.value->size());
  for (size_t i = 0; i < vocab.value->size(); ++i) {
    const json& entry = (*vocab.value)[i];
    if (!entry.is_array() || entry.size() != 2 || !entry[0].is_string() || !entry[1].is_number()) {
      return Place{&entry, place.source, absl::StrCat(vocab.path, "[", i, "]")}.Wrong(
          "[piece, score]");
    }
    pieces.push_back({entry[0].get_ref<const std::string&>(), entry[1].get<double>()});
  }
  ASSIGN_OR_RETURN(Place unk, place.At("unk_id"));
  ASSIGN_OR_RETURN(int64_t unk_id, unk.Id());
  ASSIGN_OR_RETURN(bool byte_fallback, place.BoolAt("byte_fallback", false));
  auto model = UnigramModel::Create(std::move(pieces), unk_id, byte_fallback);
  if (!model.ok()) return Within(place, model.status());
  return model;
}

absl::StatusOr<ReplaceStep> ParseReplace(const Place& place) {
  ReplaceStep step;
  ASSIGN_OR_RETURN(step.content, place.StringAt("content"));
  ASSIGN_OR_RETURN(Place pattern, place.At("pattern"));
  ASSIGN_OR_RETURN(std::optional<Place> literal, pattern.Find("String"));
  if (literal) {
    ASSIGN_OR_RETURN(step.pattern, literal->String());
  } else {
    ASSIGN_OR_RETURN(Place regex, pattern.At("Regex"));
    ASSIGN_OR_RETURN(std::string expression, regex.String());
    // The one kind of expression that SentencePiece models are converted with: runs of blanks.
    absl::string_view rest = expression;
    if (absl::ConsumeSuffix(&rest, "{2,}")) {
      step.run_min = 2;
    } else if (absl::ConsumeSuffix(&rest, "+")) {
      step.run_min = 1;
    }
    if (step.run_min == 0 || rest != " ") {
      return absl::UnimplementedError(absl::StrCat(regex.source, ": ", regex.path, " is \"",
                                                   absl::CHexEscape(expression),
                                                   "\"; known are \" {2,}\" and \" +\""));
    }
    step.pattern = std::string(rest);
  }
  if (step.pattern.empty()) return pattern.Wrong("a pattern that is not empty");
  return step;
}

absl::StatusOr<Charsmap> ParseCharsmap(const Place& place, absl::string_view blob) {
  auto map = Charsmap::Parse(blob);
  if (!map.ok()) return Within(place, map.status());
  return map;
}

absl::Status ParseNormalizer(const Place& place, int depth, std::vector<NormalizerStep>& steps) {
  if (depth > kStepDepthMax) return place.Wrong("nested less deeply");
  ASSIGN_OR_RETURN(std::string type, place.StringAt("type"));
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(Place list, place.At("normalizers"));
    ASSIGN_OR_RETURN(std::vector<Place> items, list.List());
    for (const Place& item : items) RETURN_IF_ERROR(ParseNormalizer(item, depth + 1, steps));
  } else if (type == "Precompiled") {
    ASSIGN_OR_RETURN(std::optional<Place> encoded, place.Find("precompiled_charsmap"));
    if (!encoded) return absl::OkStatus();
    ASSIGN_OR_RETURN(std::string text, encoded->String());
    std::string blob;
    if (!absl::Base64Unescape(text, &blob)) return encoded->Wrong("base64");
    if (blob.empty()) return absl::OkStatus();
    ASSIGN_OR_RETURN(Charsmap map, ParseCharsmap(*encoded, blob));
    steps.emplace_back(std::move(map));
  } else if (type == "Strip") {
    StripStep step;
    ASSIGN_OR_RETURN(step.left, place.BoolAt("strip_left", false));
    ASSIGN_OR_RETURN(step.right, place.BoolAt("strip_right", false));
    steps.emplace_back(step);
  } else if (type == "Replace") {
    ASSIGN_OR_RETURN(ReplaceStep step, ParseReplace(place));
    steps.emplace_back(std::move(step));
  } else if (type == "NFC") {
    steps.emplace_back(NormalForm::kNfc);
  } else if (type == "NFD") {
    steps.emplace_back(NormalForm::kNfd);
  } else if (type == "NFKC") {
    steps.emplace_back(NormalForm::kNfkc);
  } else if (type == "NFKD") {
    steps.emplace_back(NormalForm::kNfkd);
  } else {
    return place.Unknown("normalizer", type,
                         "Sequence, Precompiled, Strip, Replace, NFC, NFD, NFKC, NFKD");
  }
  return absl::OkStatus();
}

absl::StatusOr<MetaspaceStep> ParseMetaspace(const Place& place) {
  MetaspaceStep step;
  ASSIGN_OR_RETURN(std::optional<Place> mark, place.Find("replacement"));
  if (mark) {
    ASSIGN_OR_RETURN(step.mark, mark->String());
    if (DecodeUtf8(step.mark).size() != 1) return mark->Wrong("one character");
  }
  // Older files say add_prefix_space, newer ones prepend_scheme.
  ASSIGN_OR_RETURN(bool prefix, place.BoolAt("add_prefix_space", true));
  if (!prefix) step.prepend = MetaspaceStep::Prepend::kNever;
  ASSIGN_OR_RETURN(std::optional<Place> scheme, place.Find("prepend_scheme"));
  if (scheme) {
    ASSIGN_OR_RETURN(std::string name, scheme->String());
    if (name == "always") {
      step.prepend = MetaspaceStep::Prepend::kAlways;
    } else if (name == "first") {
      step.prepend = MetaspaceStep::Prepend::kFirst;
    } else if (name == "never") {
      step.prepend = MetaspaceStep::Prepend::kNever;
    } else {
      return scheme->Wrong("always, first or never");
    }
  }
  ASSIGN_OR_RETURN(step.split, place.BoolAt("split", true));
  return step;
}

absl::Status ParsePreTokenizer(const Place& place, int depth,
                               std::vector<PreTokenizerStep>& steps) {
  if (depth > kStepDepthMax) return place.Wrong("nested less deeply");
  ASSIGN_OR_RETURN(std::string type, place.StringAt("type"));
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(Place list, place.At("pretokenizers"));
    ASSIGN_OR_RETURN(std::vector<Place> items, list.List());
    for (const Place& item : items) RETURN_IF_ERROR(ParsePreTokenizer(item, depth + 1, steps));
  } else if (type == "WhitespaceSplit") {
    steps.emplace_back(WhiteSpaceStep{});
  } else if (type == "Metaspace") {
    ASSIGN_OR_RETURN(MetaspaceStep step, ParseMetaspace(place));
    steps.emplace_back(std::move(step));
  } else {
    return place.Unknown("pre-tokenizer", type, "Sequence, WhitespaceSplit, Metaspace");
  }
  return absl::OkStatus();
}

absl::StatusOr<AddedToken> ParseAddedToken(const Place& place, int64_t id) {
  AddedToken token;
  token.id = id;
  ASSIGN_OR_RETURN(token.content, place.StringAt("content"));
  ASSIGN_OR_RETURN(token.single_word, place.BoolAt("single_word", false));
  ASSIGN_OR_RETURN(token.lstrip, place.BoolAt("lstrip", false));
  ASSIGN_OR_RETURN(token.rstrip, place.BoolAt("rstrip", false));
  ASSIGN_OR_RETURN(bool special, place.BoolAt("special", false));
  ASSIGN_OR_RETURN(token.normalized, place.BoolAt("normalized", !special));
  return token;
}

// Appends the token, which may not contradict the vocabulary.
absl::Status AddToken(const Place& place, AddedToken token, TokenizerSpec& spec) {
  const std::optional<int64_t> known = spec.model.Find(token.content);
  if (known ? *known != token.id : token.id < spec.model.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        place.source, ": ", place.path, " gives \"", absl::CHexEscape(token.content), "\" the id ",
        token.id, ", but in the vocabulary ",
        known ? absl::StrCat("it has the id ", *known) : std::string("that is another piece")));
  }
  spec.added_tokens.push_back(std::move(token));
  return absl::OkStatus();
}

std::optional<int64_t> FindToken(const TokenizerSpec& spec, absl::string_view content) {
  for (const AddedToken& token : spec.added_tokens) {
    if (token.content == content) return token.id;
  }
  return spec.model.Find(content);
}

absl::Status SetEndOfText(absl::string_view source, absl::string_view eos, TokenizerSpec& spec) {
  const std::optional<int64_t> id = FindToken(spec, eos);
  if (!id) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": the end-of-text token \"",
                                                   absl::CHexEscape(eos),
                                                   "\" is not in the vocabulary"));
  }
  spec.suffix_ids = {*id};
  return absl::OkStatus();
}

// What stands before and after the pieces of a text: `single` of a TemplateProcessing.
absl::Status ParsePostProcessor(const Place& place, TokenizerSpec& spec) {
  ASSIGN_OR_RETURN(std::string type, place.StringAt("type"));
  if (type != "TemplateProcessing")
    return place.Unknown("post-processor", type, "TemplateProcessing");
  ASSIGN_OR_RETURN(Place single, place.At("single"));
  ASSIGN_OR_RETURN(std::vector<Place> items, single.List());
  int sequences = 0;
  for (const Place& item : items) {
    ASSIGN_OR_RETURN(std::optional<Place> special, item.Find("SpecialToken"));
    if (!special) {
      RETURN_IF_ERROR(item.At("Sequence").status());
      ++sequences;
      continue;
    }
    ASSIGN_OR_RETURN(std::string name, special->StringAt("id"));
    ASSIGN_OR_RETURN(Place specials, place.At("special_tokens"));
    ASSIGN_OR_RETURN(Place entry, specials.At(name));
    ASSIGN_OR_RETURN(Place ids, entry.At("ids"));
    ASSIGN_OR_RETURN(std::vector<Place> list, ids.List());
    for (const Place& id_place : list) {
      ASSIGN_OR_RETURN(int64_t id, id_place.Id());
      (sequences == 0 ? spec.prefix_ids : spec.suffix_ids).push_back(id);
    }
  }
  if (sequences != 1) return single.Wrong("a template with the text in it once");
  if (spec.suffix_ids.empty())
    return single.Wrong("a template that ends with the end-of-text token");
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFile(const std::filesystem::path& path) {
  std::error_code error;
  if (std::filesystem::status(path, error).type() != std::filesystem::file_type::regular) {
    return absl::InvalidArgumentError(absl::StrCat(path.string(), " is not a regular file"));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::PermissionDeniedError(absl::StrCat("cannot open ", path.string()));
  std::string bytes;
  std::vector<char> buffer(1 << 16);
  while (file.read(buffer.data(), static_cast<std::streamsize>(buffer.size())) ||
         file.gcount() > 0) {
    bytes.append(buffer.data(), static_cast<size_t>(file.gcount()));
    if (bytes.size() > kSpieceBytesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat(path.string(), " is larger than ", kSpieceBytesMax >> 20, " MiB"));
    }
  }
  if (file.bad()) return absl::DataLossError(absl::StrCat("cannot read ", path.string()));
  return bytes;
}

// Vocabulary, normalisation and control tokens of a spiece.model; the rest as transformers converts
// it for T5.
absl::StatusOr<TokenizerSpec> ParseSpieceModel(const std::string& bytes, absl::string_view source) {
  auto wrong = [&](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": ", what...));
  };
  spiece::Model proto;
  if (!proto.ParseFromString(bytes)) return wrong("not a SentencePiece model (broken protobuf)");
  if (proto.trainer().model_type() != 1) {
    return wrong("trainer_spec.model_type is ", proto.trainer().model_type(),
                 ", but must be 1 (unigram)");
  }
  std::vector<UnigramModel::Piece> pieces;
  std::vector<AddedToken> controls;
  std::optional<int64_t> unk_id;
  for (int i = 0; i < proto.pieces_size(); ++i) {
    const spiece::Piece& piece = proto.pieces(i);
    if (EncodeUtf8(DecodeUtf8(piece.text())) != piece.text()) {
      return wrong("piece ", i, " \"", absl::CHexEscape(piece.text()), "\" is not UTF-8");
    }
    if (piece.type() == spiece::UNKNOWN) {
      if (unk_id) return wrong("pieces ", *unk_id, " and ", i, " are both the unknown piece");
      unk_id = i;
    } else if (piece.type() == spiece::CONTROL || piece.type() == spiece::USER_DEFINED) {
      controls.push_back({.content = piece.text(), .id = i});
    }
    pieces.push_back({piece.text(), static_cast<double>(piece.score())});
  }
  if (!unk_id) return wrong("no piece is the unknown piece");
  auto model = UnigramModel::Create(std::move(pieces), *unk_id, proto.trainer().byte_fallback());
  if (!model.ok()) return wrong(model.status().message());
  TokenizerSpec spec{.model = *std::move(model)};
  spec.added_tokens = std::move(controls);
  if (!proto.normalizer().precompiled_charsmap().empty()) {
    auto map = Charsmap::Parse(proto.normalizer().precompiled_charsmap());
    if (!map.ok()) {
      return wrong("normalizer_spec.precompiled_charsmap ", map.status().message());
    }
    spec.normalizers.emplace_back(*std::move(map));
  }
  spec.pre_tokenizers.emplace_back(WhiteSpaceStep{});
  MetaspaceStep metaspace;
  if (!proto.normalizer().add_dummy_prefix()) metaspace.prepend = MetaspaceStep::Prepend::kNever;
  spec.pre_tokenizers.emplace_back(std::move(metaspace));
  return spec;
}

// A special token in the files beside spiece.model: its text, or an object with its text as
// `content`. An id that no file gives is the vocabulary's, or for <extra_id_k> of T5 the k-th from
// the end of `extra_ids` ids behind the vocabulary.
absl::Status AddSpecialToken(const Place& place, int64_t extra_ids, TokenizerSpec& spec) {
  AddedToken token;
  if (place.value->is_object()) {
    ASSIGN_OR_RETURN(token, ParseAddedToken(place, 0));
    token.normalized = false;
  } else {
    ASSIGN_OR_RETURN(token.content, place.String());
  }
  if (token.content.empty()) return place.Wrong("a token that is not empty");
  if (std::optional<int64_t> id = FindToken(spec, token.content)) {
    token.id = *id;
  } else {
    absl::string_view number = token.content;
    int64_t k = 0;
    if (!absl::ConsumePrefix(&number, "<extra_id_") || !absl::ConsumeSuffix(&number, ">") ||
        !absl::SimpleAtoi(number, &k) || k < 0 || k >= extra_ids) {
      return place.Wrong(
          "a token of the vocabulary, or one with an id under added_tokens_decoder of "
          "tokenizer_config.json");
    }
    token.id = spec.model.size() + extra_ids - 1 - k;
  }
  for (const AddedToken& known : spec.added_tokens) {
    if (known.content == token.content) return absl::OkStatus();
  }
  return AddToken(place, std::move(token), spec);
}

// The added tokens of tokenizer_config.json or special_tokens_map.json, for a spiece.model without
// tokenizer.json.
absl::Status AddConfiguredTokens(const Place& file, std::string& eos, TokenizerSpec& spec) {
  ASSIGN_OR_RETURN(std::optional<Place> decoder, file.Find("added_tokens_decoder"));
  if (decoder) {
    if (!decoder->value->is_object()) return decoder->Wrong("an object");
    for (const auto& [key, value] : decoder->value->items()) {
      const Place place{&value, file.source, decoder->Sub(key)};
      int64_t id = 0;
      if (!absl::SimpleAtoi(key, &id) || id < 0 || id > kIdMax) {
        return decoder->Wrong(absl::StrCat("keyed by ids from 0 to ", kIdMax));
      }
      ASSIGN_OR_RETURN(AddedToken token, ParseAddedToken(place, id));
      RETURN_IF_ERROR(AddToken(place, std::move(token), spec));
    }
  }
  std::vector<Place> tokens;
  for (const char* key : {"eos_token", "pad_token", "unk_token"}) {
    ASSIGN_OR_RETURN(std::optional<Place> token, file.Find(key));
    if (token) tokens.push_back(*token);
  }
  for (const char* key : {"additional_special_tokens", "extra_special_tokens"}) {
    ASSIGN_OR_RETURN(std::optional<Place> list, file.Find(key));
    if (!list || !list->value->is_array())
      continue;  // extra_special_tokens may be an object of roles
    ASSIGN_OR_RETURN(std::vector<Place> items, list->List());
    tokens.insert(tokens.end(), items.begin(), items.end());
  }
  int64_t extra_ids = 0;
  ASSIGN_OR_RETURN(std::optional<Place> extra, file.Find("extra_ids"));
  if (extra) {
    ASSIGN_OR_RETURN(extra_ids, extra->Id());
  } else {
    std::set<std::string> sentinels;
    for (const Place& place : tokens) {
      const std::string text = place.value->is_string() ? place.value->get<std::string>() : "";
      if (text.rfind("<extra_id_", 0) == 0) sentinels.insert(text);
    }
    extra_ids = static_cast<int64_t>(sentinels.size());
  }
  for (const Place& place : tokens) RETURN_IF_ERROR(AddSpecialToken(place, extra_ids, spec));
  ASSIGN_OR_RETURN(std::optional<Place> end, file.Find("eos_token"));
  if (end) {
    if (end->value->is_object()) {
      ASSIGN_OR_RETURN(eos, end->StringAt("content"));
    } else {
      ASSIGN_OR_RETURN(eos, end->String());
    }
  }
  return absl::OkStatus();
}

bool Exists(const std::filesystem::path& path) {
  std::error_code error;
  const auto type = std::filesystem::status(path, error).type();
  // What cannot be looked at may be there: opening it will say why not.
  return type != std::filesystem::file_type::not_found;
}

}  // namespace

absl::StatusOr<TokenizerSpec> ParseTokenizerJson(const json& document, absl::string_view source) {
  const Place root{&document, std::string(source), ""};
  ASSIGN_OR_RETURN(Place model_place, root.At("model"));
  ASSIGN_OR_RETURN(UnigramModel model, ParseModel(model_place));
  TokenizerSpec spec{.model = std::move(model)};

  ASSIGN_OR_RETURN(std::optional<Place> normalizer, root.Find("normalizer"));
  if (normalizer) RETURN_IF_ERROR(ParseNormalizer(*normalizer, 0, spec.normalizers));
  ASSIGN_OR_RETURN(std::optional<Place> pre_tokenizer, root.Find("pre_tokenizer"));
  if (pre_tokenizer) RETURN_IF_ERROR(ParsePreTokenizer(*pre_tokenizer, 0, spec.pre_tokenizers));

  ASSIGN_OR_RETURN(std::optional<Place> added, root.Find("added_tokens"));
  if (added) {
    ASSIGN_OR_RETURN(std::vector<Place> items, added->List());
    for (const Place& item : items) {
      ASSIGN_OR_RETURN(Place id_place, item.At("id"));
      ASSIGN_OR_RETURN(int64_t id, id_place.Id());
      ASSIGN_OR_RETURN(AddedToken token, ParseAddedToken(item, id));
      RETURN_IF_ERROR(AddToken(item, std::move(token), spec));
    }
  }

  ASSIGN_OR_RETURN(std::optional<Place> post_processor, root.Find("post_processor"));
  if (post_processor) {
    RETURN_IF_ERROR(ParsePostProcessor(*post_processor, spec));
  } else {
    RETURN_IF_ERROR(SetEndOfText(source, "</s>", spec));
  }
  return spec;
}

absl::StatusOr<TokenizerSpec> ReadTokenizerSpec(const std::filesystem::path& tokenizer_dir) {
  const std::filesystem::path tokenizer_json = tokenizer_dir / "tokenizer.json";
  if (Exists(tokenizer_json)) {
    ASSIGN_OR_RETURN(json document, ReadJsonFile(tokenizer_json));
    return ParseTokenizerJson(document, tokenizer_json.string());
  }
  const std::filesystem::path spiece_model = tokenizer_dir / "spiece.model";
  if (!Exists(spiece_model)) {
    return absl::NotFoundError(absl::StrCat(
        "no tokenizer in ", tokenizer_dir.string(),
        ": neither tokenizer.json nor spiece.model is there (a T5 or UMT5 tokenizer has one)"));
  }
  ASSIGN_OR_RETURN(std::string bytes, ReadFile(spiece_model));
  ASSIGN_OR_RETURN(TokenizerSpec spec, ParseSpieceModel(bytes, spiece_model.string()));
  std::string eos = "</s>";
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json"}) {
    const std::filesystem::path path = tokenizer_dir / name;
    if (!Exists(path)) continue;
    ASSIGN_OR_RETURN(json document, ReadJsonFile(path));
    RETURN_IF_ERROR(AddConfiguredTokens({&document, path.string(), ""}, eos, spec));
  }
  RETURN_IF_ERROR(SetEndOfText(spiece_model.string(), eos, spec));
  return spec;
}

}  // namespace dlo
