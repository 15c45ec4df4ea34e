#include "base/config.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "yaml-cpp/eventhandler.h"
#include "yaml-cpp/exceptions.h"
#include "yaml-cpp/mark.h"
#include "yaml-cpp/parser.h"

namespace dlo {
namespace {

constexpr absl::string_view kEnvironmentPrefix = "DLO_";
constexpr size_t kNestingMax = 16;

std::string Quoted(absl::string_view text) {
  std::string escaped = absl::Utf8SafeCHexEscape(text.substr(0, 100));
  return absl::StrCat("\"", escaped, text.size() > 100 ? "..." : "", "\"");
}

// One scalar of the file with the path of keys that leads to it.
struct FileEntry {
  std::vector<std::string> path;
  std::string text;
  bool null = false;
  bool quoted = false;
  int line = 0;  // from 1

  std::string key() const { return absl::StrJoin(path, "."); }
};

// Thrown inside the yaml-cpp parser to end it; never leaves ReadFile.
struct Refusal {
  std::string message;
  int line = 0;
};

// Flattens the mappings of one document into entries, without building yaml-cpp's node graph.
class FileReader final : public YAML::EventHandler {
 public:
  std::vector<FileEntry> TakeEntries() { return std::move(entries_); }

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (++documents_ > 1)
      throw Refusal{"a second document starts here; only one is allowed", mark.line};
  }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    RefuseAnchor(mark, anchor);
    if (levels_.empty()) return;  // an empty document
    Scalar(mark, "", /*null=*/true, /*quoted=*/false);
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    throw Refusal{"aliases are not supported; write the value out", mark.line};
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    RefuseAnchor(mark, anchor);
    // yaml-cpp's marks for untagged scalars: "?" for plain ones, "!" for quoted ones.
    if (tag != "?" && tag != "!") {
      throw Refusal{absl::StrCat("the tag ", Quoted(tag), " is not supported; remove it"),
                    mark.line};
    }
    if (levels_.empty()) {
      throw Refusal{absl::StrCat("the file must hold a mapping of keys, not ", Quoted(value)),
                    mark.line};
    }
    Scalar(mark, value, /*null=*/false, /*quoted=*/tag == "!");
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {
    if (levels_.empty())
      throw Refusal{"the file must hold a mapping of keys, not a list", mark.line};
    if (!levels_.back().expects_value) throw Refusal{"a key must not be a list", mark.line};
    throw Refusal{absl::StrCat(Path(), " must not be a list"), mark.line};
  }
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    RefuseAnchor(mark, anchor);
    if (tag != "?" && !tag.empty()) {
      throw Refusal{absl::StrCat("the tag ", Quoted(tag), " is not supported; remove it"),
                    mark.line};
    }
    if (!levels_.empty() && !levels_.back().expects_value) {
      throw Refusal{"a key must not be a mapping", mark.line};
    }
    if (levels_.size() >= kNestingMax) {
      throw Refusal{absl::StrCat("nested more than ", kNestingMax, " levels deep"), mark.line};
    }
    levels_.emplace_back();
  }
  void OnMapEnd() override {
    const bool empty = levels_.back().lines.empty();
    levels_.pop_back();
    // A name with an empty mapping must be known like any other.
    if (empty && !levels_.empty())
      Entry(levels_.back().lines[levels_.back().key], "", /*null=*/true, false);
    if (!levels_.empty()) levels_.back().expects_value = false;
  }

 private:
  struct Level {
    std::map<std::string, int> lines;  // of the keys so far
    std::string key;
    bool expects_value = false;
  };

  static void RefuseAnchor(const YAML::Mark& mark, YAML::anchor_t anchor) {
    if (anchor != 0) throw Refusal{"anchors are not supported; remove it", mark.line};
  }

  std::string Path() const {
    return absl::StrJoin(levels_, ".", [](std::string* out, const Level& level) {
      absl::StrAppend(out, level.key);
    });
  }

  void Scalar(const YAML::Mark& mark, const std::string& value, bool null, bool quoted) {
    Level& level = levels_.back();
    if (!level.expects_value) {
      if (null || value.empty()) throw Refusal{"a key is empty", mark.line};
      const auto [it, fresh] = level.lines.emplace(value, mark.line + 1);
      level.key = value;
      if (!fresh) {
        throw Refusal{absl::StrCat(Path(), " is given twice, first in line ", it->second),
                      mark.line};
      }
      level.expects_value = true;
      return;
    }
    Entry(mark.line + 1, value, null, quoted);
    level.expects_value = false;
  }

  void Entry(int line, const std::string& text, bool null, bool quoted) {
    FileEntry entry{.text = text, .null = null, .quoted = quoted, .line = line};
    for (const Level& open : levels_) entry.path.push_back(open.key);
    entries_.push_back(std::move(entry));
  }

  std::vector<Level> levels_;  // the mappings around the current position, outermost first
  std::vector<FileEntry> entries_;
  int documents_ = 0;
};

absl::StatusOr<std::string> ReadText(const std::filesystem::path& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) {
    return absl::NotFoundError(absl::StrCat("there is no configuration file ", path.string()));
  }
  if (status.type() != std::filesystem::file_type::regular) {
    return absl::InvalidArgumentError(absl::StrCat(path.string(), " is not a regular file"));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::InvalidArgumentError(absl::StrCat("cannot open ", path.string()));
  std::string text(kConfigBytesMax + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (static_cast<int64_t>(text.size()) > kConfigBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(path.string(), " is larger than ", FormatBytes(kConfigBytesMax)));
  }
  // yaml-cpp would read UTF-16 and UTF-32 as well.
  if (text.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat(path.string(), " holds a zero byte; it must be UTF-8 text"));
  }
  return text;
}

absl::StatusOr<std::vector<FileEntry>> ReadFile(const std::filesystem::path& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  const auto refuse = [&](int line, absl::string_view message) {
    return absl::InvalidArgumentError(absl::StrCat(path.string(), ":", line + 1, ": ", message));
  };
  FileReader reader;
  try {
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(reader)) {
    }
  } catch (const Refusal& refusal) {
    return refuse(refusal.line, refusal.message);
  } catch (const YAML::Exception& error) {
    return refuse(std::max(error.mark.line, 0), absl::StrCat("not valid YAML: ", error.msg));
  } catch (const std::exception& error) {
    return refuse(0, absl::StrCat("not valid YAML: ", error.what()));
  }
  return reader.TakeEntries();
}

// Insertions, deletions, substitutions and swaps of neighbours that turn one text into the other.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      d[i][j] =
          std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

absl::string_view LastPart(absl::string_view key) { return key.substr(key.rfind('.') + 1); }

// "; did you mean X?", or what there is.
std::string Suggestion(absl::string_view unknown, const std::vector<std::string>& candidates) {
  const std::string nearest = NearestName(unknown, candidates);
  if (!nearest.empty()) return absl::StrCat("; did you mean ", nearest, "?");
  return absl::StrCat("; known are ", absl::StrJoin(candidates, ", "));
}

std::filesystem::path HomeExpanded(const std::string& text) {
  if (text != "~" && !absl::StartsWith(text, "~/")) return text;
  const char* home = std::getenv("HOME");
  if (home == nullptr || *home == '\0') return text;
  return std::filesystem::path(home) / text.substr(std::min<size_t>(2, text.size()));
}

// Whether YAML reads `text` back as this very string when it stands without quotes.
bool IsPlainSafe(const std::string& text) {
  if (text.empty() || text == "~" || absl::EqualsIgnoreCase(text, "null")) return false;
  if (!absl::ascii_isalnum(text[0]) && text[0] != '/' && text[0] != '.') return false;
  for (const char c : text) {
    if (!absl::ascii_isalnum(c) && absl::string_view("/._-+@").find(c) == absl::string_view::npos &&
        c != ':') {
      return false;
    }
  }
  // A colon at the end makes a key of it.
  return text.back() != ':';
}

std::string YamlScalar(const std::string& text) {
  if (IsPlainSafe(text)) return text;
  return absl::StrCat("\"", absl::StrReplaceAll(text, {{"\\", "\\\\"}, {"\"", "\\\""}}), "\"");
}

}  // namespace

std::string ConfigKey::environment_name() const {
  return absl::StrCat(kEnvironmentPrefix,
                      absl::AsciiStrToUpper(absl::StrReplaceAll(key, {{".", "_"}})));
}

std::map<std::string, std::string> EnvironmentOf(const char* const* environ) {
  std::map<std::string, std::string> environment;
  for (; environ != nullptr && *environ != nullptr; ++environ) {
    const std::pair<std::string, std::string> variable =
        absl::StrSplit(*environ, absl::MaxSplits('=', 1));
    environment.insert(variable);
  }
  return environment;
}

std::string NearestName(absl::string_view unknown, const std::vector<std::string>& candidates) {
  unknown = unknown.substr(0, 100);
  std::string nearest;
  size_t nearest_distance = 0;
  for (const std::string& candidate : candidates) {
    size_t distance = EditDistance(unknown, candidate);
    // `slots` at the top level for `offload.slots`, or in the wrong section.
    if (LastPart(unknown) == LastPart(candidate) && candidate != unknown)
      distance = std::min<size_t>(distance, 1);
    if (nearest.empty() || distance < nearest_distance) {
      nearest = candidate;
      nearest_distance = distance;
    }
  }
  return nearest_distance <= std::max<size_t>(2, unknown.size() / 3) ? nearest : "";
}

namespace {

// Reads `text` as `key` wants it. The error says what is wrong without naming where.
absl::Status ParseValue(const ConfigKey& key, const std::string& text,
                        const std::filesystem::path& folder, std::string* canonical,
                        int64_t* number, absl::Duration* duration) {
  const auto wrong = [&](absl::string_view allowed) {
    return absl::InvalidArgumentError(absl::StrCat("is ", Quoted(text), ", but must be ", allowed));
  };
  *canonical = text;
  // Nobody means these, and a quote that is never closed makes them.
  const bool control =
      std::any_of(text.begin(), text.end(), [](char c) { return absl::ascii_iscntrl(c); });
  if (control || absl::StripAsciiWhitespace(text) != text) {
    return wrong("one line without blanks around it");
  }
  switch (key.type) {
    case ConfigType::kString:
      if (!key.allowed.empty() &&
          std::find(key.allowed.begin(), key.allowed.end(), text) == key.allowed.end()) {
        const std::string nearest = NearestName(text, key.allowed);
        return wrong(
            absl::StrCat(key.allowed.size() == 1 ? "" : "one of ", absl::StrJoin(key.allowed, ", "),
                         nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest, "?")));
      }
      return absl::OkStatus();
    case ConfigType::kInt:
      if (std::find(key.allowed.begin(), key.allowed.end(), text) != key.allowed.end()) {
        *number = -1;
        *canonical = text;
        return absl::OkStatus();
      }
      // SimpleAtoi takes blanks around the digits and a plus sign; nobody means those.
      if (text.find_first_not_of("-0123456789") != std::string::npos ||
          !absl::SimpleAtoi(text, number) || *number < key.min || *number > key.max) {
        return wrong(absl::StrCat("a whole number from ", key.min, " to ", key.max,
                                  key.allowed.empty() ? "" : ", or ",
                                  absl::StrJoin(key.allowed, ", or ")));
      }
      *canonical = absl::StrCat(*number);
      return absl::OkStatus();
    case ConfigType::kBool:
      if (text != "true" && text != "false") return wrong("true or false");
      *number = text == "true";
      return absl::OkStatus();
    case ConfigType::kBytes: {
      const absl::StatusOr<int64_t> bytes = ParseBytes(text);
      if (!bytes.ok())
        return absl::InvalidArgumentError(absl::StrCat("is wrong: ", bytes.status().message()));
      *number = *bytes;
      *canonical = FormatBytes(*bytes);
      return absl::OkStatus();
    }
    case ConfigType::kDuration: {
      const absl::StatusOr<absl::Duration> parsed = ParseDuration(text);
      if (!parsed.ok())
        return absl::InvalidArgumentError(absl::StrCat("is wrong: ", parsed.status().message()));
      *duration = *parsed;
      *canonical = absl::FormatDuration(*parsed);
      return absl::OkStatus();
    }
    case ConfigType::kPathOrName:
    case ConfigType::kPath: {
      std::error_code error;
      // A path that may be left out has none as its default.
      if (text.empty()) return key.fallback.empty() ? absl::OkStatus() : wrong("a path");
      if (key.type == ConfigType::kPathOrName) {
        const bool path = absl::StartsWith(text, "/") || absl::StartsWith(text, "./") ||
                          absl::StartsWith(text, "../") || absl::StartsWith(text, "~/") ||
                          std::filesystem::is_directory(folder / text, error);
        if (!path) return absl::OkStatus();
      }
      const std::filesystem::path absolute =
          std::filesystem::absolute(folder / HomeExpanded(text), error).lexically_normal();
      if (error) return wrong("a path that exists or can be made");
      *canonical = absolute.string();
      return absl::OkStatus();
    }
  }
  return absl::InternalError("unreachable");
}

}  // namespace

absl::StatusOr<Config> Config::Load(const ConfigSchema& schema, const ConfigSources& sources) {
  Config config;
  config.schema_ = schema;
  std::vector<std::string> errors;
  std::map<std::string, const ConfigKey*> by_key, by_environment, by_flag;
  std::vector<std::string> keys, environment_names = sources.other_environment, sections;
  for (const ConfigKey& key : config.schema_) {
    by_key[key.key] = &key;
    by_environment[key.environment_name()] = &key;
    by_flag[key.flag] = &key;
    keys.push_back(key.key);
    environment_names.push_back(key.environment_name());
    if (const size_t dot = key.key.rfind('.'); dot != std::string::npos) {
      sections.push_back(key.key.substr(0, dot));
    }
  }
  const auto is_section = [&](const std::string& key) {
    return std::find(sections.begin(), sections.end(), key) != sections.end();
  };

  // `where` opens the message: "FILE:LINE: model.path", "the environment variable DLO_MODEL_PATH",
  // "--model".
  const auto set = [&](const ConfigKey& key, const std::string& text, Source source,
                       std::string origin, absl::string_view where,
                       const std::filesystem::path& folder) {
    Value value;
    value.source = source;
    value.origin = std::move(origin);
    const absl::Status status =
        ParseValue(key, text, folder, &value.text, &value.number, &value.duration);
    if (!status.ok()) {
      errors.push_back(absl::StrCat(where, " ", status.message()));
      return;
    }
    config.values_[key.key] = std::move(value);
  };

  for (const ConfigKey& key : config.schema_) {
    set(key, key.fallback, Source::kDefault, "default", absl::StrCat("the default of ", key.key),
        "");
  }

  if (sources.file) {
    const std::string file = sources.file->string();
    std::error_code error;
    const std::filesystem::path folder =
        std::filesystem::absolute(*sources.file, error).parent_path();
    ASSIGN_OR_RETURN(const std::vector<FileEntry> entries, ReadFile(*sources.file));
    for (const FileEntry& entry : entries) {
      const std::string name = entry.key();
      const std::string where = absl::StrCat(file, ":", entry.line, ": ");
      const auto it = by_key.find(name);
      const bool dotted =
          std::any_of(entry.path.begin(), entry.path.end(),
                      [](const std::string& part) { return absl::StrContains(part, "."); });
      if (it != by_key.end() && dotted) {
        errors.push_back(absl::StrCat(
            where, name, " must be nested: ", absl::StrReplaceAll(name, {{".", ": {"}}), ": ...}"));
      } else if (it == by_key.end() && is_section(name)) {
        if (entry.null) continue;  // a section whose keys are all commented out
        errors.push_back(absl::StrCat(
            where, name, " is ", Quoted(entry.text), ", but must be a mapping with keys such as ",
            LastPart(*std::find_if(keys.begin(), keys.end(), [&](const auto& key) {
              return absl::StartsWith(key, absl::StrCat(name, "."));
            }))));
      } else if (it == by_key.end()) {
        errors.push_back(absl::StrCat(where, "unknown key ", Quoted(name), Suggestion(name, keys)));
      } else if (entry.null) {
        errors.push_back(
            absl::StrCat(where, name, " has no value; give it one or remove the line"));
      } else if (entry.quoted &&
                 (it->second->type == ConfigType::kInt || it->second->type == ConfigType::kBool)) {
        errors.push_back(
            absl::StrCat(where, name, " is the string ", Quoted(entry.text), ", but must be ",
                         it->second->type == ConfigType::kInt ? "a whole number" : "true or false",
                         "; remove the quotes"));
      } else {
        set(*it->second, entry.text, Source::kFile, absl::StrCat("file ", file, ":", entry.line),
            absl::StrCat(where, name), folder);
      }
    }
  }

  for (const auto& [name, text] : sources.environment) {
    if (!absl::StartsWith(name, kEnvironmentPrefix)) continue;
    const auto it = by_environment.find(name);
    if (it != by_environment.end()) {
      set(*it->second, text, Source::kEnvironment, absl::StrCat("env ", name),
          absl::StrCat("the environment variable ", name), "");
    } else if (std::find(sources.other_environment.begin(), sources.other_environment.end(),
                         name) == sources.other_environment.end()) {
      errors.push_back(absl::StrCat("unknown environment variable ", Quoted(name),
                                    Suggestion(name, environment_names)));
    }
  }

  for (const auto& [flag, text] : sources.flags) {
    const auto it = by_flag.find(flag);
    if (it == by_flag.end()) {
      errors.push_back(absl::StrCat("unknown flag ", Quoted(flag)));
    } else {
      const auto written = sources.flags_as_written.find(flag);
      const std::string& name = written == sources.flags_as_written.end() ? flag : written->second;
      set(*it->second, text, Source::kFlag, absl::StrCat("flag ", name), name, "");
    }
  }

  if (!errors.empty()) return absl::InvalidArgumentError(absl::StrJoin(errors, "\n"));
  return config;
}

const Config::Value& Config::Get(absl::string_view key, ConfigType type) const {
  const auto it = values_.find(std::string(key));
  const auto declared =
      std::find_if(schema_.begin(), schema_.end(),
                   [&](const ConfigKey& candidate) { return candidate.key == key; });
  if (it == values_.end() || declared == schema_.end() || declared->type != type) std::abort();
  return it->second;
}

const std::string& Config::String(absl::string_view key) const {
  return Get(key, ConfigType::kString).text;
}
int64_t Config::Int(absl::string_view key) const { return Get(key, ConfigType::kInt).number; }
bool Config::Bool(absl::string_view key) const { return Get(key, ConfigType::kBool).number != 0; }
int64_t Config::Bytes(absl::string_view key) const { return Get(key, ConfigType::kBytes).number; }
absl::Duration Config::Duration(absl::string_view key) const {
  return Get(key, ConfigType::kDuration).duration;
}
std::filesystem::path Config::Path(absl::string_view key) const {
  return Get(key, ConfigType::kPath).text;
}
const std::string& Config::PathOrName(absl::string_view key) const {
  return Get(key, ConfigType::kPathOrName).text;
}

bool Config::IsDefault(absl::string_view key) const {
  return values_.find(std::string(key))->second.source == Source::kDefault;
}
std::string Config::OriginText(absl::string_view key) const {
  return values_.find(std::string(key))->second.origin;
}

std::string Config::FlagOf(absl::string_view key) const {
  return std::find_if(schema_.begin(), schema_.end(),
                      [&](const ConfigKey& candidate) { return candidate.key == key; })
      ->flag;
}

std::string Config::Dump() const {
  std::string out;
  std::string section;
  for (const ConfigKey& key : schema_) {
    const size_t dot = key.key.rfind('.');
    const std::string key_section = dot == std::string::npos ? "" : key.key.substr(0, dot);
    if (key_section != section && !key_section.empty()) absl::StrAppend(&out, key_section, ":\n");
    section = key_section;
    const Value& value = values_.find(key.key)->second;
    absl::StrAppend(&out, section.empty() ? "" : "  ", LastPart(key.key), ": ",
                    YamlScalar(value.text), "  # ", absl::Utf8SafeCHexEscape(value.origin), "\n");
  }
  return out;
}

}  // namespace dlo
