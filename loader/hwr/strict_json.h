// Reading JSON objects that must have exactly the keys and types expected. Internal to loader/hwr/.
//
//   StrictObject object(json, "manifest.json");
//   int64_t schema = object.Int("schema", 1, 1);
//   std::string key = object.Digest("key");
//   RETURN_IF_ERROR(object.Finish());   // the first thing wrong; a key that nobody asked for, too
//
// A getter gives an empty value where something is wrong. Nothing is converted: a boolean is no
// number. One thread; keeps a reference to the value it reads.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace dlo::hwr {

class StrictObject {
 public:
  StrictObject(const nlohmann::json& value, std::string where);

  int64_t Int(const char* key, int64_t min, int64_t max);
  std::string String(const char* key);
  // Of [A-Za-z0-9._+-], 1 to 128 of them.
  std::string Word(const char* key);
  std::string Digest(const char* key);
  // Empty for null.
  std::string OptionalDigest(const char* key);
  const nlohmann::json& Object(const char* key);
  const nlohmann::json& List(const char* key, size_t length_max);

  void Fail(absl::string_view key, absl::string_view what);
  absl::Status Finish();

 private:
  const nlohmann::json& Get(const char* key);

  const nlohmann::json& value_;
  const std::string where_;
  std::set<std::string> known_;
  std::string error_;
};

bool IsWord(absl::string_view text);

}  // namespace dlo::hwr
