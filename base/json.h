// Untrusted JSON files: parsed within limits, read key by key with types, ranges and defaults.
//
//   ASSIGN_OR_RETURN(nlohmann::json json, ReadJsonFile(root / "config.json"));
//   JsonReader reader("transformer/config.json", json);
//   int64_t layers = 40;
//   reader.Int("num_layers", 1, 1024, &layers);   // a missing key leaves the default
//   reader.Ignore({"dropout"});
//   RETURN_IF_ERROR(reader.Finish());             // every wrong key at once; logs the unknown ones
//
// A reader belongs to one thread and keeps a reference to the object it reads.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace dlo {

// Largest JSON file that is read (configurations are a few kB, the tensor index of a large model a
// few MB) and its deepest nesting.
inline constexpr int64_t kJsonBytesMax = int64_t{64} << 20;
inline constexpr int kJsonDepthMax = 64;

// INVALID_ARGUMENT, starting with `source`: not JSON (with line and column), nested too deep, or a
// key given twice in one object.
absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text, absl::string_view source);

// NOT_FOUND without the file; INVALID_ARGUMENT for a file that is no regular file, too large, or as
// ParseJson.
absl::StatusOr<nlohmann::json> ReadJsonFile(const std::filesystem::path& path);

// A value as it stands in the file, shortened, for an error message.
std::string JsonExcerpt(const nlohmann::json& value);

// Each getter leaves `out` as it is where the key is missing, and notes an error naming file, key,
// value and what is allowed where the value is wrong. null is a wrong value except where `out` is
// an optional.
class JsonReader {
 public:
  // `file` names the source in messages. `object` may be anything; if it is no object, Finish says
  // so.
  JsonReader(std::string file, const nlohmann::json& object);

  bool has(absl::string_view key) const;

  void Int(absl::string_view key, int64_t min, int64_t max, int64_t* out);
  void OptionalInt(absl::string_view key, int64_t min, int64_t max, std::optional<int64_t>* out);
  // min and max are inclusive and finite.
  void Double(absl::string_view key, double min, double max, double* out);
  void OptionalDouble(absl::string_view key, double min, double max, std::optional<double>* out);
  void Bool(absl::string_view key, bool* out);
  void String(absl::string_view key, std::string* out);
  void IntList(absl::string_view key, int64_t min, int64_t max, size_t length_max,
               std::vector<int64_t>* out);
  void DoubleList(absl::string_view key, double min, double max, size_t length_max,
                  std::vector<double>* out);
  void BoolList(absl::string_view key, size_t length_max, std::vector<bool>* out);

  // The key must be missing, or have one of `allowed`; `why` ends the message. `missing_is` is what
  // a missing key means.
  void Require(absl::string_view key, const std::vector<nlohmann::json>& allowed,
               const nlohmann::json& missing_is, absl::string_view why);

  // Keys that are known and have no effect here.
  void Ignore(std::initializer_list<absl::string_view> keys);

  // Notes an error about `key` found by the caller.
  void Fail(absl::string_view key, absl::string_view what);

  // INVALID_ARGUMENT with every error noted, or OK. Keys nobody asked for are logged in one line;
  // keys that start with "_" are not.
  absl::Status Finish();

 private:
  const nlohmann::json* Find(absl::string_view key);
  void Wrong(absl::string_view key, const nlohmann::json& value, absl::string_view allowed);
  std::optional<int64_t> CheckInt(absl::string_view key, const nlohmann::json& value, int64_t min,
                                  int64_t max);
  std::optional<double> CheckDouble(absl::string_view key, const nlohmann::json& value, double min,
                                    double max);
  const nlohmann::json* FindList(absl::string_view key, size_t length_max);

  std::string file_;
  const nlohmann::json& object_;
  std::set<std::string> known_;
  std::vector<std::string> errors_;
};

}  // namespace dlo
