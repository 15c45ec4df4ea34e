#include "loader/hwr/filesystem.h"

#include <linux/magic.h>
#include <sys/vfs.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace dlo::hwr {
namespace {

constexpr absl::string_view kDisks[] = {
    "aufs",    "bcachefs", "btrfs", "erofs",   "ext2",     "ext3",   "ext4", "f2fs",
    "fuseblk", "jfs",      "ntfs3", "overlay", "reiserfs", "rootfs", "xfs",  "zfs"};
constexpr absl::string_view kMemories[] = {"tmpfs", "ramfs"};

// A field of the table with its octal escapes undone.
std::string Unescape(absl::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto octal = [&](size_t at) { return text[at] >= '0' && text[at] <= '7'; };
    if (text[i] == '\\' && i + 3 < text.size() && octal(i + 1) && octal(i + 2) && octal(i + 3)) {
      out.push_back(static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 +
                                      (text[i + 3] - '0')));
      i += 3;
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

bool IsAbove(absl::string_view folder, absl::string_view path) {
  if (folder == "/") return absl::StartsWith(path, "/");
  return absl::StartsWith(path, folder) &&
         (path.size() == folder.size() || path[folder.size()] == '/');
}

}  // namespace

absl::string_view StorageClassName(StorageClass storage) {
  switch (storage) {
    case StorageClass::kDisk:
      return "disk";
    case StorageClass::kTmpfs:
      return "tmpfs";
    case StorageClass::kRefused:
      break;
  }
  return "refused";
}

StorageClass ClassOf(absl::string_view filesystem) {
  const auto among = [&](const auto& names) {
    return std::find(std::begin(names), std::end(names), filesystem) != std::end(names);
  };
  if (among(kDisks)) return StorageClass::kDisk;
  if (among(kMemories)) return StorageClass::kTmpfs;
  return StorageClass::kRefused;
}

absl::StatusOr<std::string> FilesystemOf(const std::filesystem::path& path,
                                         absl::string_view mount_table) {
  std::string type;
  size_t best = 0;
  for (const absl::string_view line : absl::StrSplit(mount_table, '\n', absl::SkipEmpty())) {
    // id parent device root MOUNT-POINT options [tags...] - TYPE source options
    const std::vector<absl::string_view> fields = absl::StrSplit(line, ' ');
    const auto dash =
        std::find(fields.begin() + std::min<size_t>(fields.size(), 6), fields.end(), "-");
    if (dash == fields.end() || dash + 1 == fields.end()) continue;
    const std::string point = Unescape(fields[4]);
    if (IsAbove(point, path.native()) && point.size() >= best) {
      best = point.size();
      type = Unescape(*(dash + 1));
    }
  }
  if (type.empty()) {
    return absl::NotFoundError(absl::StrCat("no mount point above ", path.native(), " is known"));
  }
  return type;
}

std::string ReadMountTable() {
  std::ifstream in("/proc/self/mountinfo");
  return std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

absl::StatusOr<std::string> FilesystemOfNumber(int64_t number) {
  switch (number) {
    case EXT4_SUPER_MAGIC:  // ext2 and ext3, too
      return "ext4";
    case XFS_SUPER_MAGIC:
      return "xfs";
    case BTRFS_SUPER_MAGIC:
      return "btrfs";
    case F2FS_SUPER_MAGIC:
      return "f2fs";
    case OVERLAYFS_SUPER_MAGIC:
      return "overlay";
    case TMPFS_MAGIC:
      return "tmpfs";
    default:
      return absl::NotFoundError(
          absl::StrCat("its filesystem, number 0x", absl::Hex(number), ", is not known"));
  }
}

absl::StatusOr<std::string> FilesystemAt(const std::filesystem::path& path) {
  const absl::StatusOr<std::string> mounted = FilesystemOf(path, ReadMountTable());
  if (mounted.ok()) return mounted;
  struct statfs info;
  if (statfs(path.c_str(), &info) != 0 && statfs(path.parent_path().c_str(), &info) != 0) {
    return mounted;
  }
  return FilesystemOfNumber(info.f_type);
}

}  // namespace dlo::hwr
