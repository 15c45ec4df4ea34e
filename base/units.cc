#include "base/units.h"

#include <cmath>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace dlo {
namespace {

struct Unit {
  absl::string_view name;
  int64_t bytes;
};

constexpr Unit kByteUnits[] = {
    {"TiB", int64_t{1} << 40},
    {"GiB", int64_t{1} << 30},
    {"MiB", int64_t{1} << 20},
    {"KiB", int64_t{1} << 10},
    {"TB", 1000000000000},
    {"GB", 1000000000},
    {"MB", 1000000},
    {"kB", 1000},
    {"B", 1},
    {"", 1},
};

std::string Quoted(absl::string_view text) {
  return absl::StrCat("\"", absl::CHexEscape(text.substr(0, 64)), "\"");
}

}  // namespace

absl::StatusOr<int64_t> ParseBytes(absl::string_view text) {
  const absl::string_view stripped = absl::StripAsciiWhitespace(text);
  const size_t digits = stripped.find_first_not_of("0123456789.");
  const absl::string_view number = stripped.substr(0, digits);
  const absl::string_view unit =
      digits == absl::string_view::npos ? "" : absl::StripAsciiWhitespace(stripped.substr(digits));
  double value = 0;
  int64_t whole = 0;
  for (const Unit& candidate : kByteUnits) {
    if (candidate.name != unit) continue;
    // Whole numbers stay exact beyond the 53 bits of a double.
    if (absl::SimpleAtoi(number, &whole)) {
      if (whole > std::numeric_limits<int64_t>::max() / candidate.bytes) break;
      return whole * candidate.bytes;
    }
    if (!absl::SimpleAtod(number, &value)) break;
    const double bytes = std::floor(value * static_cast<double>(candidate.bytes));
    if (!(bytes < 9.2e18)) break;
    return static_cast<int64_t>(bytes);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      Quoted(text),
      " is not a size; write a number with a unit, such as 20GiB, 512MiB, 1.5GB or 4096"));
}

std::string FormatBytes(int64_t bytes) {
  std::string shortest = absl::StrCat(bytes);
  for (const Unit& unit : kByteUnits) {
    if (bytes == 0 || bytes % unit.bytes != 0 || unit.bytes == 1) continue;
    const std::string text = absl::StrCat(bytes / unit.bytes, unit.name);
    if (text.size() < shortest.size()) shortest = text;
  }
  return shortest;
}

absl::StatusOr<absl::Duration> ParseDuration(absl::string_view text) {
  absl::Duration duration;
  if (absl::ParseDuration(text, &duration) && duration >= absl::ZeroDuration() &&
      duration < absl::InfiniteDuration()) {
    return duration;
  }
  return absl::InvalidArgumentError(
      absl::StrCat(Quoted(text),
                   " is not a duration; write a number with a unit, such as 500ms, 2s, "
                   "5m, 1h or 1m30s"));
}

}  // namespace dlo
