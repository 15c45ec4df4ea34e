// Small things done to a folder through its descriptor: no path is followed twice, no link once.
// Internal to loader/hwr/.
//
// Errors: DATA_LOSS for something that should be there and is not, or is not what it should be
// (a link, another kind of file, another owner, another mode, a second hard link): the state of the
// store is wrong. RESOURCE_EXHAUSTED for no space. DEADLINE_EXCEEDED for a lock that somebody else
// has. UNAVAILABLE for everything else that the operating system says.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "loader/hwr/descriptor.h"
#include "loader/hwr/file_ops.h"

namespace dlo::hwr {

// Of errno, as said above.
absl::Status IoError(absl::string_view what);

enum class LockKind : uint8_t { kShared, kExclusive };

// Waits for a lock on an open file until the deadline.
absl::Status Lock(int fd, LockKind kind, absl::Time deadline);
// False if somebody else has it.
bool TryLock(int fd, LockKind kind);
// Whether somebody has it shared, by Lock and another open file. Takes nothing, so that nobody
// finds it taken.
bool IsShared(int fd);

// A folder, not through a link. ENOENT is NOT_FOUND.
absl::StatusOr<Descriptor> OpenFolder(FileOps& ops, int parent, const std::string& name);
// Makes it, with mode 0700, where it is not.
absl::StatusOr<Descriptor> MakeFolder(FileOps& ops, int parent, const std::string& name);
// DATA_LOSS unless the folder is this user's, and neither group nor others may write to it.
absl::Status CheckPrivate(int fd, absl::string_view what);

// A published file: regular, this user's, mode 0444, one hard link. ENOENT is DATA_LOSS.
absl::StatusOr<Descriptor> OpenPublished(FileOps& ops, int folder, const std::string& name,
                                         struct stat* info);
// All of an open file; RESOURCE_EXHAUSTED beyond `bytes_max`.
absl::StatusOr<std::string> ReadAll(FileOps& ops, int fd, int64_t bytes_max);
// A file of our own, of any mode without write bits for others. ENOENT is NOT_FOUND.
absl::StatusOr<std::string> ReadOwn(FileOps& ops, int folder, const std::string& name,
                                    int64_t bytes_max);

absl::Status WriteAll(FileOps& ops, int fd, absl::string_view bytes);
// A new file, flushed and with this mode; the folder is not flushed.
absl::Status WriteNew(FileOps& ops, int folder, const std::string& name, absl::string_view bytes,
                      mode_t mode);
// Written beside, flushed, then renamed over NAME; the folder is flushed. One writer at a time.
absl::Status Replace(FileOps& ops, int folder, const std::string& name, absl::string_view bytes);

bool Exists(int folder, const std::string& name);
// The same file or folder, by device and inode.
bool IsStill(int folder, const std::string& name, const struct stat& info);

// Names in a folder, sorted, without . and ..
absl::StatusOr<std::vector<std::string>> ListNames(int folder);
// Sizes of the regular files below a folder; what vanishes meanwhile counts as nothing.
int64_t BytesBelow(int folder);
// Removes a file or a folder with everything in it; nothing there is fine.
absl::Status RemoveTree(FileOps& ops, int folder, const std::string& name);

// `bytes` random bytes in hexadecimal.
std::string RandomHex(int bytes);

}  // namespace dlo::hwr
