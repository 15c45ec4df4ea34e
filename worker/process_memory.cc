#include "worker/process_memory.h"

#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"

namespace dlo {

int64_t HostBytesPeak() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    absl::string_view value = line;
    if (!absl::ConsumePrefix(&value, "VmHWM:") || !absl::ConsumeSuffix(&value, "kB")) continue;
    int64_t kib = 0;
    return absl::SimpleAtoi(value, &kib) ? kib << 10 : 0;
  }
  return 0;
}

}  // namespace dlo
