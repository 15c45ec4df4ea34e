// Which filesystem a path is on, and whether a store may be there. Internal to loader/hwr/. Pure.
//
//   ASSIGN_OR_RETURN(std::string type, FilesystemOf("/var/lib/dlo", ReadMountTable()));
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

}  // namespace dlo::hwr
