#include "loader/model_path.h"

#include <pwd.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "loader/messages.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;

struct HubId {
  std::string organisation;
  std::string name;
  std::string revision;  // empty: "main"
};

std::optional<std::string> ProcessEnvironment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

// A variable that is set to nothing counts as unset.
std::string Variable(const EnvironmentLookup& environment, const char* name) {
  return environment(name).value_or("");
}

std::string HomeFolder(const EnvironmentLookup& environment) {
  std::string home = Variable(environment, "HOME");
  if (!home.empty()) return home;
  passwd entry;
  passwd* found = nullptr;
  char buffer[4096];
  if (getpwuid_r(getuid(), &entry, buffer, sizeof(buffer), &found) == 0 && found != nullptr) {
    return found->pw_dir;
  }
  return "/";
}

fs::path ExpandHome(const std::string& path, const EnvironmentLookup& environment) {
  if (path == "~") return HomeFolder(environment);
  if (absl::StartsWith(path, "~/")) return fs::path(HomeFolder(environment)) / path.substr(2);
  return path;
}

fs::path HubCache(const EnvironmentLookup& environment) {
  for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"}) {
    std::string value = Variable(environment, name);
    if (!value.empty()) return ExpandHome(value, environment);
  }
  std::string home = Variable(environment, "HF_HOME");
  if (!home.empty()) return ExpandHome(home, environment) / "hub";
  std::string xdg = Variable(environment, "XDG_CACHE_HOME");
  if (!xdg.empty()) return ExpandHome(xdg, environment) / "huggingface" / "hub";
  return fs::path(HomeFolder(environment)) / ".cache" / "huggingface" / "hub";
}

// One part of an id, a branch or a tag: what the hub allows, and nothing that could climb out of
// the cache or confuse a shell.
bool IsPlainName(absl::string_view text) {
  if (text.empty() || text[0] == '.' || text[0] == '-' || absl::StrContains(text, "..")) {
    return false;
  }
  for (char c : text) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '_' && c != '-')
      return false;
  }
  return true;
}

std::optional<HubId> ParseHubId(absl::string_view text) {
  std::pair<absl::string_view, absl::string_view> halves =
      absl::StrSplit(text, absl::MaxSplits('@', 1));
  std::vector<absl::string_view> parts = absl::StrSplit(halves.first, '/');
  if (parts.size() != 2 || !IsPlainName(parts[0]) || !IsPlainName(parts[1])) return std::nullopt;
  if (absl::StrContains(text, "@")) {
    for (absl::string_view part : absl::StrSplit(halves.second, '/')) {
      if (!IsPlainName(part)) return std::nullopt;
    }
  }
  return HubId{std::string(parts[0]), std::string(parts[1]), std::string(halves.second)};
}

bool IsFolder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

std::string Absolute(const fs::path& path) {
  std::error_code error;
  fs::path absolute = fs::absolute(path, error);
  return error ? path.native() : absolute.native();
}

// The commit that a branch or tag of a cached repository points at; empty if the cache does not
// know it.
std::string ReadRef(const fs::path& repository, const std::string& revision) {
  std::ifstream in(repository / "refs" / revision);
  std::string commit;
  std::getline(in, commit);
  commit = std::string(absl::StripAsciiWhitespace(commit));
  return IsPlainName(commit) ? commit : "";
}

absl::StatusOr<fs::path> FindSnapshot(const HubId& id, const std::string& text,
                                      const EnvironmentLookup& environment) {
  const fs::path repository =
      HubCache(environment) / absl::StrCat("models--", id.organisation, "--", id.name);
  const std::string revision = id.revision.empty() ? "main" : id.revision;
  const std::string commit = ReadRef(repository, revision);
  fs::path snapshot = repository / "snapshots" / (commit.empty() ? revision : commit);
  if (IsFolder(snapshot)) return snapshot;

  std::string looked =
      absl::StrCat("neither a folder (", Absolute(text), ") nor in the Hugging Face cache (");
  if (!IsFolder(repository)) {
    absl::StrAppend(&looked, Absolute(repository));
  } else if (commit.empty()) {
    absl::StrAppend(&looked, Absolute(repository / "refs" / revision), " and ", Absolute(snapshot));
  } else {
    absl::StrAppend(&looked, Absolute(snapshot), ", where refs/", revision, " points");
  }
  return absl::NotFoundError(
      absl::StrCat("model ", QuoteForMessage(text), " is ", looked,
                   "); fetch it with: hf download ", id.organisation, "/", id.name,
                   id.revision.empty() ? "" : absl::StrCat(" --revision ", id.revision)));
}

}  // namespace

absl::StatusOr<std::filesystem::path> ResolveModelPath(const std::string& folder_or_hub_id) {
  return ResolveModelPath(folder_or_hub_id, ProcessEnvironment);
}

absl::StatusOr<std::filesystem::path> ResolveModelPath(const std::string& folder_or_hub_id,
                                                       const EnvironmentLookup& environment) {
  if (folder_or_hub_id.empty() || absl::StrContains(folder_or_hub_id, absl::string_view("\0", 1))) {
    return absl::InvalidArgumentError("the model path is empty or holds a NUL byte");
  }
  fs::path folder = ExpandHome(folder_or_hub_id, environment);
  if (IsFolder(folder)) return folder;
  std::error_code ignored;
  if (fs::exists(folder, ignored)) {
    return absl::InvalidArgumentError(
        absl::StrCat("model ", QuoteForMessage(folder_or_hub_id),
                     " is a file; name the folder that holds model_index.json"));
  }
  if (std::optional<HubId> id = ParseHubId(folder_or_hub_id)) {
    return FindSnapshot(*id, folder_or_hub_id, environment);
  }
  return absl::NotFoundError(absl::StrCat(
      "model ", QuoteForMessage(folder_or_hub_id), " is no folder (looked at ", Absolute(folder),
      ") and does not read like a Hugging Face id (org/name or org/name@revision)"));
}

}  // namespace dlo
