#include "base/cgroup_memory.h"

#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Version 1 writes the largest multiple of a page for "no limit".
constexpr int64_t kNoLimit = int64_t{1} << 62;

// The cgroup's path for the memory controller of version 1, or in version 2's one tree.
std::optional<std::string> FindPath(const fs::path& list, bool version1) {
  std::ifstream lines(list);
  for (std::string line; std::getline(lines, line);) {
    // hierarchy:controllers:path
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::vector<std::string> controllers = absl::StrSplit(parts[1], ',');
    const bool found = version1 ? absl::c_linear_search(controllers, "memory") : parts[0] == "0";
    if (found) return parts[2];
  }
  return std::nullopt;
}

double ReadBytes(const fs::path& path) {
  std::string text;
  if (!(std::ifstream(path) >> text)) return kNan;
  if (text == "max") return kInfinity;
  int64_t bytes = 0;
  if (!absl::SimpleAtoi(text, &bytes)) return kNan;
  return bytes >= kNoLimit ? kInfinity : static_cast<double>(bytes);
}

CgroupMemory Read(const fs::path& mount, const std::string& cgroup, const char* used,
                  const char* limit) {
  fs::path folder = mount / fs::path(cgroup).relative_path();
  std::error_code error;
  // A container may see its own cgroup as the mount's root, and the path as the host has it.
  if (!fs::exists(folder / used, error)) folder = mount;
  return {ReadBytes(folder / used), ReadBytes(folder / limit)};
}

}  // namespace

CgroupMemory ReadCgroupMemory(const fs::path& root) {
  const fs::path list = root / "proc/self/cgroup";
  const fs::path mount = root / "sys/fs/cgroup";
  if (const auto path = FindPath(list, /*version1=*/true)) {
    return Read(mount / "memory", *path, "memory.usage_in_bytes", "memory.limit_in_bytes");
  }
  if (const auto path = FindPath(list, /*version1=*/false)) {
    return Read(mount, *path, "memory.current", "memory.max");
  }
  return {kNan, kNan};
}

}  // namespace dlo
