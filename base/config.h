// Strict layered configuration: values of a schema from default < file < environment < flag, each
// with its origin.
//
//   const ConfigSchema schema = {
//       {.key = "listen", .flag = "--listen", .fallback = "127.0.0.1:50051", .help = "..."},
//       {.key = "offload.slots", .type = ConfigType::kInt, .flag = "--slots", .fallback = "2"}};
//   ASSIGN_OR_RETURN(Config config, Config::Load(schema, {.file = "serve.yaml",
//                                                         .environment = EnvironmentOf(environ)}));
//   config.Int("offload.slots");         // 2
//   config.OriginText("offload.slots");  // "file serve.yaml:3", "env DLO_OFFLOAD_SLOTS",
//                                        // "flag --slots", "default"
//
// The file is one YAML document of nested mappings; the environment's name of offload.slots is
// DLO_OFFLOAD_SLOTS. Nothing is guessed: an unknown key or DLO_ variable (the nearest known name is
// suggested), a key given twice, a wrong type, an alias or a tag is an error with its line. A
// relative path in a file is relative to the file's folder; "~/" is the home folder.
//
// A Config is immutable and safe to use from any thread. Getters take keys of the schema of the
// matching type; another one is a programmer's error. Errors are INVALID_ARGUMENT, all of them at
// once, one a line; NOT_FOUND for a missing file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace dlo {

enum class ConfigType {
  kString,
  kInt,
  kBool,
  kBytes,
  kDuration,
  kPath,
  // A path if it starts with "/", "./", "../" or "~/" or names a folder that exists; else a name,
  // left as it is.
  kPathOrName,
};

struct ConfigKey {
  std::string key;  // dotted, e.g. "offload.slots"
  ConfigType type = ConfigType::kString;
  std::string flag;      // "--slots"
  std::string fallback;  // the default, written as in a file
  // kString: the values there are; empty: any. kInt: words beside the numbers; Int gives -1.
  std::vector<std::string> allowed = {};
  int64_t min = 0;  // kInt
  int64_t max = std::numeric_limits<int32_t>::max();
  std::string help;

  // "DLO_OFFLOAD_SLOTS"
  std::string environment_name() const;
};

// The keys of one section stand together.
using ConfigSchema = std::vector<ConfigKey>;

struct ConfigSources {
  std::optional<std::filesystem::path> file;
  std::map<std::string, std::string>
      environment;  // all of it: names that do not start with DLO_ are passed over
  std::vector<std::string> other_environment = {};  // DLO_ variables that are no keys of the schema
  std::map<std::string, std::string> flags;         // flag -> text
  // What the command line says where it is not the flag: another name for it.
  std::map<std::string, std::string> flags_as_written = {};
};

// Largest configuration file that is read.
inline constexpr int64_t kConfigBytesMax = 64 << 10;

// `environ` as a map.
std::map<std::string, std::string> EnvironmentOf(const char* const* environ);

// The candidate that `unknown` most likely means, or "" if none is near.
std::string NearestName(absl::string_view unknown, const std::vector<std::string>& candidates);

class Config {
 public:
  static absl::StatusOr<Config> Load(const ConfigSchema& schema, const ConfigSources& sources);

  const std::string& String(absl::string_view key) const;
  int64_t Int(absl::string_view key) const;
  bool Bool(absl::string_view key) const;
  int64_t Bytes(absl::string_view key) const;
  absl::Duration Duration(absl::string_view key) const;
  std::filesystem::path Path(absl::string_view key) const;     // absolute
  const std::string& PathOrName(absl::string_view key) const;  // a path is absolute

  bool IsDefault(absl::string_view key) const;
  std::string OriginText(absl::string_view key) const;
  std::string FlagOf(absl::string_view key) const;

  // A YAML file with every effective value that says in a comment where it came from. Loading it
  // gives the same values.
  std::string Dump() const;

 private:
  enum class Source { kDefault, kFile, kEnvironment, kFlag };
  struct Value {
    std::string text;    // as Dump writes it: canonical, paths made absolute
    int64_t number = 0;  // kInt, kBool, kBytes
    absl::Duration duration;
    Source source = Source::kDefault;
    std::string origin;
  };

  const Value& Get(absl::string_view key, ConfigType type) const;

  ConfigSchema schema_;
  std::map<std::string, Value> values_;
};

}  // namespace dlo
