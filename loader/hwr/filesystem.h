// Which filesystem a path is on, and whether a store may be there. Internal to loader/hwr/.
//
//   ASSIGN_OR_RETURN(std::string type, FilesystemAt("/var/lib/dlo"));
//   if (ClassOf(type) == StorageClass::kRefused) ...
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dlo::hwr {

enum class StorageClass : uint8_t {
  kDisk,
  kTmpfs,   // its files are host memory
  kRefused  // remote or unknown: locks, renames and mappings are trusted on one kernel only
};
absl::string_view StorageClassName(StorageClass storage);

// By the allow-list.
StorageClass ClassOf(absl::string_view filesystem);

// Of the most specific mount point above an absolute, normal path; of several at one place, the
// last. `mount_table` as in /proc/self/mountinfo. NOT_FOUND if no line of it fits.
absl::StatusOr<std::string> FilesystemOf(const std::filesystem::path& path,
                                         absl::string_view mount_table);

// /proc/self/mountinfo; empty if it cannot be read.
std::string ReadMountTable();

// By the number that a local filesystem gives itself, `f_type` of statfs(2). NOT_FOUND for others.
absl::StatusOr<std::string> FilesystemOfNumber(int64_t number);

// Of an absolute, normal path, of which the last part need not be there, by this process' mount
// table. That of a process in a chroot says nothing of the root itself: then by number.
absl::StatusOr<std::string> FilesystemAt(const std::filesystem::path& path);

}  // namespace dlo::hwr
