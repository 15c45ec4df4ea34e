// Whether text is UTF-8.
#pragma once

#include <cstddef>

#include "absl/strings/string_view.h"

namespace dlo {

// The first byte that is not part of well-formed UTF-8 (RFC 3629, table 3-7 of the Unicode
// standard), or npos. Pure; any thread.
size_t FindInvalidUtf8(absl::string_view text);

}  // namespace dlo
