// The process's logger.
//
//   StartLogging("dlo-worker 0", "info");
//   spdlog::info("rank {} is ready", 0);
//
// writes "2026-11-29 19:56:29.906 info dlo-worker 0: rank 0 is ready" to standard error.
//
// Called once, by main, before other threads start. A test that wants to read the log sets spdlog's
// default logger itself.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace dlo {

// The levels there are, from the most talkative to "off".
const std::vector<std::string>& LogLevels();

// `process` opens every line. A level that is not in LogLevels counts as "info".
void StartLogging(absl::string_view process, absl::string_view level);

}  // namespace dlo
