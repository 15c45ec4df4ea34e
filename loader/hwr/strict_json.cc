#include "loader/hwr/strict_json.h"

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "loader/hwr/identity.h"

namespace dlo::hwr {
namespace {

using nlohmann::json;

constexpr size_t kWordBytesMax = 128;

const json& Nothing() {
  static const json nothing;
  return nothing;
}

}  // namespace

bool IsWord(absl::string_view text) {
  if (text.empty() || text.size() > kWordBytesMax) return false;
  for (const char c : text) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '_' && c != '+' &&
        c != '-') {
      return false;
    }
  }
  return true;
}

StrictObject::StrictObject(const json& value, std::string where)
    : value_(value), where_(std::move(where)) {
  if (!value_.is_object()) error_ = absl::StrCat(where_, ": not an object");
}

void StrictObject::Fail(absl::string_view key, absl::string_view what) {
  if (error_.empty()) error_ = absl::StrCat(where_, ": ", key, " ", what);
}

const json& StrictObject::Get(const char* key) {
  known_.insert(key);
  if (!value_.is_object()) return Nothing();
  const auto found = value_.find(key);
  if (found == value_.end()) {
    Fail(key, "is missing");
    return Nothing();
  }
  return *found;
}

int64_t StrictObject::Int(const char* key, int64_t min, int64_t max) {
  const json& value = Get(key);
  if (!value.is_number_integer() ||
      (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{INT64_MAX})) {
    Fail(key, "is no integer of 64 bits");
    return 0;
  }
  const int64_t number = value.get<int64_t>();
  if (number < min || number > max) {
    Fail(key, absl::StrCat("is ", number, ", not from ", min, " to ", max));
    return 0;
  }
  return number;
}

std::string StrictObject::String(const char* key) {
  const json& value = Get(key);
  if (!value.is_string()) {
    Fail(key, "is no text");
    return "";
  }
  return value.get<std::string>();
}

std::string StrictObject::Word(const char* key) {
  std::string text = String(key);
  if (!IsWord(text)) {
    Fail(key, "is no plain word");
    text.clear();
  }
  return text;
}

std::string StrictObject::Digest(const char* key) {
  std::string text = String(key);
  if (!IsDigest(text)) {
    Fail(key, "is no digest");
    text.clear();
  }
  return text;
}

std::string StrictObject::OptionalDigest(const char* key) {
  if (Get(key).is_null()) return "";
  return Digest(key);
}

const json& StrictObject::Object(const char* key) {
  const json& value = Get(key);
  if (!value.is_object()) Fail(key, "is no object");
  return value;
}

const json& StrictObject::List(const char* key, size_t length_max) {
  const json& value = Get(key);
  if (!value.is_array() || value.size() > length_max) {
    Fail(key, absl::StrCat("is no list of at most ", length_max));
    return Nothing();
  }
  return value;
}

absl::Status StrictObject::Finish() {
  if (error_.empty() && value_.is_object()) {
    for (const auto& [key, value] : value_.items()) {
      if (known_.count(key) == 0) {
        Fail(absl::StrCat("the key ", JsonExcerpt(key)), "is not known");
        break;
      }
    }
  }
  return error_.empty() ? absl::OkStatus() : absl::InvalidArgumentError(error_);
}

}  // namespace dlo::hwr
