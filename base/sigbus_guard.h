// Copying out of a file's mapping whose pages may be gone.
//
//   if (!GuardedCopy(to, mapped, bytes)) return absl::DataLossError("the file was truncated");
//
// Reading a mapped page that its file no longer has, or whose disk fails, raises SIGBUS, which
// otherwise ends the process. Within GuardedCopy it ends the copy. Thread-safe: each thread guards
// what it copies itself.
//
// The first call installs a handler of SIGBUS for the process. A SIGBUS from anywhere else goes on
// to the handler that was there before, or ends the process as it would have. A handler that
// somebody installs later must do the same with what is not its own.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dlo {

// Copies as memcpy does. False if a byte of `from` could not be read; what `to` then holds is
// unspecified.
bool GuardedCopy(std::byte* to, const std::byte* from, int64_t bytes);

}  // namespace dlo
