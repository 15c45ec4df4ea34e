#include "base/log.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace dlo {

const std::vector<std::string>& LogLevels() {
  static const auto* const levels =
      new std::vector<std::string>{"trace", "debug", "info", "warning", "error", "off"};
  return *levels;
}

void StartLogging(absl::string_view process, absl::string_view level) {
  auto logger = std::make_shared<spdlog::logger>(std::string(process),
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_pattern(absl::StrCat("%Y-%m-%d %H:%M:%S.%e %l ",
                                   absl::StrReplaceAll(process, {{"%", "%%"}}), ": %v"));
  const std::vector<std::string>& levels = LogLevels();
  const bool known = std::find(levels.begin(), levels.end(), level) != levels.end();
  logger->set_level(known ? spdlog::level::from_str(std::string(level)) : spdlog::level::info);
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace dlo
