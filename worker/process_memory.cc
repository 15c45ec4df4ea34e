#include "worker/process_memory.h"

#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"

namespace dlo {
namespace {

// The bytes of a line "Name:   123 kB".
std::optional<int64_t> Field(absl::string_view line, absl::string_view name) {
  int64_t kib = 0;
  if (!absl::ConsumePrefix(&line, name) || !absl::ConsumePrefix(&line, ":") ||
      !absl::ConsumeSuffix(&line, "kB") || !absl::SimpleAtoi(line, &kib)) {
    return std::nullopt;
  }
  return kib << 10;
}

}  // namespace

int64_t HostBytesPeak() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (const auto bytes = Field(line, "VmHWM")) return *bytes;
  }
  return 0;
}

void ParseSmapsRollup(std::istream& text, v1::RankMemory* memory) {
  for (std::string line; std::getline(text, line);) {
    if (const auto bytes = Field(line, "Pss")) memory->set_host_pss_bytes(*bytes);
    if (const auto bytes = Field(line, "Private_Dirty")) {
      memory->set_host_private_dirty_bytes(*bytes);
    }
    if (const auto bytes = Field(line, "Shared_Clean")) memory->set_host_shared_clean_bytes(*bytes);
  }
}

int64_t MappedFileBytes(std::istream& text) {
  int64_t total = 0;
  for (std::string line; std::getline(text, line);) {
    // 7f5c8a400000-7f5c8a600000 r--s 00000000 08:01 1234      /models/a.safetensors
    std::istringstream fields(line);
    std::string range, mode, offset, device, inode, path;
    if (!(fields >> range >> mode >> offset >> device >> inode >> path)) continue;
    if (mode != "r--s" || absl::StartsWith(path, "/dev/") || !absl::StartsWith(path, "/")) continue;
    const size_t dash = range.find('-');
    uint64_t begin = 0, end = 0;
    if (dash == std::string::npos || !absl::SimpleHexAtoi(range.substr(0, dash), &begin) ||
        !absl::SimpleHexAtoi(range.substr(dash + 1), &end)) {
      continue;
    }
    total += static_cast<int64_t>(end - begin);
  }
  return total;
}

}  // namespace dlo
