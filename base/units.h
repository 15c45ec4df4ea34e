// Sizes and durations as people write them in configurations and on the command line.
//
//   ASSIGN_OR_RETURN(int64_t bytes, ParseBytes("20GiB"));              // 21474836480
//   ASSIGN_OR_RETURN(absl::Duration grace, ParseDuration("1m30s"));
//
// Pure functions. Errors are INVALID_ARGUMENT and hold the value and examples.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace dlo {

// A number, whole or with a fraction, followed by B (or nothing), kB, MB, GB, TB (powers of 1000)
// or KiB, MiB, GiB, TiB (powers of 1024); blanks between the two are allowed. A fraction of a byte
// is dropped.
absl::StatusOr<int64_t> ParseBytes(absl::string_view text);

// The shortest text that ParseBytes turns into exactly `bytes` again: "20GiB", "1500kB", "7".
// Requires bytes >= 0.
std::string FormatBytes(int64_t bytes);

// What absl::FormatDuration writes: numbers with the units h, m, s, ms, us, ns, one after the
// other; at least zero and finite. Only 0 may stand without a unit.
absl::StatusOr<absl::Duration> ParseDuration(absl::string_view text);

}  // namespace dlo
