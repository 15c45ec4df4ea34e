#include "base/json.h"

#include <cmath>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "spdlog/spdlog.h"

namespace dlo {
namespace {

using nlohmann::json;

constexpr size_t kExcerptBytes = 120;
constexpr size_t kUnknownListBytes = 1000;

// Keeps a message printable: json's what() repeats bytes of the input.
std::string Printable(absl::string_view text) {
  std::string out;
  for (char c : text) {
    const bool plain =
        static_cast<unsigned char>(c) >= 0x20 && static_cast<unsigned char>(c) < 0x7f;
    out.push_back(plain ? c : '?');
  }
  return out;
}

// Builds the document and stops at the first thing that is refused, without ever recursing into the
// input.
class BoundedBuilder final : public nlohmann::json_sax<json> {
 public:
  explicit BoundedBuilder(json* root) : root_(root) {}

  bool null() override { return Add(nullptr); }
  bool boolean(bool value) override { return Add(value); }
  bool number_integer(number_integer_t value) override { return Add(value); }
  bool number_unsigned(number_unsigned_t value) override { return Add(value); }
  bool number_float(number_float_t value, const string_t&) override { return Add(value); }
  bool string(string_t& value) override { return Add(std::move(value)); }
  bool binary(binary_t&) override { return Refuse("binary data"); }

  bool start_object(size_t) override { return Open(json::object()); }
  bool start_array(size_t) override { return Open(json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }

  bool key(string_t& value) override {
    if (open_.back()->contains(value)) {
      return Refuse(absl::StrCat("the key ", json(value).dump(-1, ' ', true), " is given twice"));
    }
    key_ = std::move(value);
    return true;
  }

  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& error) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 3: ..."
    absl::string_view what = error.what();
    if (size_t end = what.find("] "); end != absl::string_view::npos) what.remove_prefix(end + 2);
    return Refuse(Printable(what.substr(0, 300)));
  }

  const std::string& refusal() const { return refusal_; }

 private:
  bool Refuse(std::string why) {
    refusal_ = std::move(why);
    return false;
  }

  json* Place(json value) {
    if (open_.empty()) {
      *root_ = std::move(value);
      return root_;
    }
    json* parent = open_.back();
    if (parent->is_array()) {
      parent->push_back(std::move(value));
      return &parent->back();
    }
    json& slot = (*parent)[key_];
    slot = std::move(value);
    return &slot;
  }

  bool Add(json value) {
    Place(std::move(value));
    return true;
  }

  bool Open(json value) {
    if (open_.size() >= kJsonDepthMax) {
      return Refuse(absl::StrCat("nested more than ", kJsonDepthMax, " levels deep"));
    }
    open_.push_back(Place(std::move(value)));
    return true;
  }

  bool Close() {
    open_.pop_back();
    return true;
  }

  json* root_;
  std::vector<json*> open_;  // the containers around the current position, outermost first
  std::string key_;
  std::string refusal_;
};

std::string RangeText(absl::string_view kind, double min, double max) {
  if (max >= 1e15) return absl::StrCat(kind, " of at least ", min);
  return absl::StrCat(kind, " from ", min, " to ", max);
}

}  // namespace

absl::StatusOr<json> ParseJson(absl::string_view text, absl::string_view source) {
  // The lexer takes a NUL byte for the end of its input and would not look at what follows.
  if (size_t nul = text.find('\0'); nul != absl::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": NUL byte at offset ", nul));
  }
  json document;
  BoundedBuilder builder(&document);
  bool parsed = false;
  std::string failure;
  try {
    parsed = json::sax_parse(text.begin(), text.end(), &builder);
    failure = builder.refusal();
  } catch (const std::exception& error) {
    failure = Printable(error.what());
  }
  if (!parsed) return absl::InvalidArgumentError(absl::StrCat(source, ": ", failure));
  return document;
}

absl::StatusOr<json> ReadJsonFile(const std::filesystem::path& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) {
    return absl::NotFoundError(absl::StrCat("no file ", path.string()));
  }
  if (status.type() != std::filesystem::file_type::regular) {
    return absl::InvalidArgumentError(absl::StrCat(path.string(), " is not a regular file"));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::PermissionDeniedError(absl::StrCat("cannot open ", path.string()));
  std::string text;
  std::vector<char> buffer(1 << 16);
  while (file.read(buffer.data(), static_cast<std::streamsize>(buffer.size())) ||
         file.gcount() > 0) {
    text.append(buffer.data(), static_cast<size_t>(file.gcount()));
    if (static_cast<int64_t>(text.size()) > kJsonBytesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat(path.string(), " is larger than ", kJsonBytesMax >> 20, " MiB"));
    }
  }
  if (file.bad()) return absl::DataLossError(absl::StrCat("cannot read ", path.string()));
  return ParseJson(text, path.string());
}

std::string JsonExcerpt(const json& value) {
  // Invalid UTF-8 cannot come out of the parser, but a caller's own value may hold it: replace,
  // never throw.
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > kExcerptBytes) text = absl::StrCat(text.substr(0, kExcerptBytes), "...");
  return text;
}

JsonReader::JsonReader(std::string file, const json& object)
    : file_(std::move(file)), object_(object) {
  if (!object.is_object()) {
    errors_.push_back(absl::StrCat("must hold a JSON object, not ", JsonExcerpt(object)));
  }
}

bool JsonReader::has(absl::string_view key) const {
  return object_.is_object() && object_.contains(std::string(key));
}

const json* JsonReader::Find(absl::string_view key) {
  known_.emplace(key);
  if (!object_.is_object()) return nullptr;
  const auto it = object_.find(std::string(key));
  return it == object_.end() ? nullptr : &*it;
}

void JsonReader::Wrong(absl::string_view key, const json& value, absl::string_view allowed) {
  errors_.push_back(absl::StrCat(key, " is ", JsonExcerpt(value), ", but must be ", allowed));
}

void JsonReader::Fail(absl::string_view key, absl::string_view what) {
  errors_.push_back(absl::StrCat(key, " ", what));
}

std::optional<int64_t> JsonReader::CheckInt(absl::string_view key, const json& value, int64_t min,
                                            int64_t max) {
  // Python writes 1.0 for a float only, so a float is never taken for an integer here.
  const bool fits =
      value.is_number_integer() &&
      !(value.is_number_unsigned() &&
        value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()));
  if (!fits || value.get<int64_t>() < min || value.get<int64_t>() > max) {
    Wrong(key, value, absl::StrCat("an integer from ", min, " to ", max));
    return std::nullopt;
  }
  return value.get<int64_t>();
}

std::optional<double> JsonReader::CheckDouble(absl::string_view key, const json& value, double min,
                                              double max) {
  if (!value.is_number() || !std::isfinite(value.get<double>()) || value.get<double>() < min ||
      value.get<double>() > max) {
    Wrong(key, value, RangeText("a number", min, max));
    return std::nullopt;
  }
  return value.get<double>();
}

void JsonReader::Int(absl::string_view key, int64_t min, int64_t max, int64_t* out) {
  if (const json* value = Find(key)) *out = CheckInt(key, *value, min, max).value_or(*out);
}

void JsonReader::OptionalInt(absl::string_view key, int64_t min, int64_t max,
                             std::optional<int64_t>* out) {
  const json* value = Find(key);
  if (value == nullptr) return;
  *out = value->is_null() ? std::nullopt : CheckInt(key, *value, min, max);
}

void JsonReader::Double(absl::string_view key, double min, double max, double* out) {
  if (const json* value = Find(key)) *out = CheckDouble(key, *value, min, max).value_or(*out);
}

void JsonReader::OptionalDouble(absl::string_view key, double min, double max,
                                std::optional<double>* out) {
  const json* value = Find(key);
  if (value == nullptr) return;
  *out = value->is_null() ? std::nullopt : CheckDouble(key, *value, min, max);
}

void JsonReader::Bool(absl::string_view key, bool* out) {
  const json* value = Find(key);
  if (value == nullptr) return;
  if (!value->is_boolean()) return Wrong(key, *value, "true or false");
  *out = value->get<bool>();
}

void JsonReader::String(absl::string_view key, std::string* out) {
  const json* value = Find(key);
  if (value == nullptr) return;
  if (!value->is_string()) return Wrong(key, *value, "a string");
  *out = value->get<std::string>();
}

const json* JsonReader::FindList(absl::string_view key, size_t length_max) {
  const json* value = Find(key);
  if (value == nullptr) return nullptr;
  if (!value->is_array() || value->size() > length_max) {
    Wrong(key, *value, absl::StrCat("a list of at most ", length_max, " values"));
    return nullptr;
  }
  return value;
}

void JsonReader::IntList(absl::string_view key, int64_t min, int64_t max, size_t length_max,
                         std::vector<int64_t>* out) {
  const json* list = FindList(key, length_max);
  if (list == nullptr) return;
  std::vector<int64_t> values;
  for (const json& value : *list) {
    const std::optional<int64_t> checked = CheckInt(key, value, min, max);
    if (!checked) return;
    values.push_back(*checked);
  }
  *out = std::move(values);
}

void JsonReader::DoubleList(absl::string_view key, double min, double max, size_t length_max,
                            std::vector<double>* out) {
  const json* list = FindList(key, length_max);
  if (list == nullptr) return;
  std::vector<double> values;
  for (const json& value : *list) {
    const std::optional<double> checked = CheckDouble(key, value, min, max);
    if (!checked) return;
    values.push_back(*checked);
  }
  *out = std::move(values);
}

void JsonReader::BoolList(absl::string_view key, size_t length_max, std::vector<bool>* out) {
  const json* list = FindList(key, length_max);
  if (list == nullptr) return;
  std::vector<bool> values;
  for (const json& value : *list) {
    if (!value.is_boolean()) return Wrong(key, value, "a list of true and false");
    values.push_back(value.get<bool>());
  }
  *out = std::move(values);
}

void JsonReader::Require(absl::string_view key, const std::vector<json>& allowed,
                         const json& missing_is, absl::string_view why) {
  const json* found = Find(key);
  const json& value = found == nullptr ? missing_is : *found;
  for (const json& candidate : allowed) {
    if (value == candidate) return;
  }
  const std::string choices = absl::StrJoin(allowed, " or ", [](std::string* out, const json& v) {
    absl::StrAppend(out, JsonExcerpt(v));
  });
  errors_.push_back(absl::StrCat(key, " is ", JsonExcerpt(value),
                                 found == nullptr ? " (the default, as the key is missing)" : "",
                                 ", but must be ", choices, why.empty() ? "" : ": ", why));
}

void JsonReader::Ignore(std::initializer_list<absl::string_view> keys) {
  for (absl::string_view key : keys) known_.emplace(key);
}

absl::Status JsonReader::Finish() {
  std::vector<std::string> unknown;
  if (object_.is_object()) {
    for (const auto& [key, value] : object_.items()) {
      if (!absl::StartsWith(key, "_") && known_.count(key) == 0) unknown.push_back(key);
    }
  }
  if (!unknown.empty()) {
    spdlog::info("{}: ignoring {} keys that are not known here: {}", file_, unknown.size(),
                 Printable(absl::StrJoin(unknown, ", ")).substr(0, kUnknownListBytes));
  }
  if (errors_.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(file_, ": ", absl::StrJoin(errors_, "; ")));
}

}  // namespace dlo
