#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/sigbus_guard.h"
#include "base/status_macros.h"

namespace dlo {

MappedFile::Identity MappedFile::IdentityOf(const struct ::stat& info) {
  return {.device = info.st_dev,
          .inode = info.st_ino,
          .size = info.st_size,
          .mtime_s = info.st_mtim.tv_sec,
          .mtime_ns = info.st_mtim.tv_nsec};
}

absl::StatusOr<MappedFile> MappedFile::Open(const std::filesystem::path& path) {
  // O_NONBLOCK: a FIFO in the file's place must not hang the open.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path.native()));
  const absl::Cleanup close_fd = [fd] { close(fd); };
  return MapChecked(fd, path);
}

absl::StatusOr<MappedFile> MappedFile::Map(int fd, const std::filesystem::path& path) {
  ASSIGN_OR_RETURN(MappedFile file, MapChecked(fd, path));
  file.fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (file.fd_ < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path.native()));
  return file;
}

absl::StatusOr<MappedFile> MappedFile::MapChecked(int fd, const std::filesystem::path& path) {
  struct stat info;
  if (fstat(fd, &info) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot stat ", path.native()));
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path.native(), ": not a regular file",
                                                   S_ISDIR(info.st_mode) ? " but a folder" : ""));
  }
  if (info.st_size == 0) {
    return absl::InvalidArgumentError(absl::StrCat(path.native(), ": the file is empty"));
  }
  const auto size = static_cast<size_t>(info.st_size);
  void* map = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot map ", path.native()));
  }
  MappedFile file;
  file.path_ = path;
  file.bytes_ = absl::MakeConstSpan(static_cast<const std::byte*>(map), size);
  file.identity_ = IdentityOf(info);
  return file;
}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(bytes_, other.bytes_);
  std::swap(identity_, other.identity_);
  std::swap(fd_, other.fd_);
  return *this;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  if (fd_ >= 0) close(fd_);
}

absl::Status MappedFile::CheckUnchanged() const {
  if (bytes_.empty()) return absl::OkStatus();
  struct stat info;
  if ((fd_ >= 0 ? fstat(fd_, &info) : stat(path_.c_str(), &info)) != 0) {
    return absl::DataLossError(absl::StrCat(
        path_.native(), " cannot be found any more since it was opened: ", std::strerror(errno)));
  }
  const Identity now = IdentityOf(info);
  if (now.device != identity_.device || now.inode != identity_.inode) {
    return absl::DataLossError(
        absl::StrCat(path_.native(), " was replaced by another file since it was opened"));
  }
  if (now.size != identity_.size) {
    return absl::DataLossError(absl::StrCat(
        path_.native(), now.size < identity_.size ? " was truncated from " : " grew from ",
        identity_.size, " to ", now.size, " bytes since it was opened"));
  }
  if (now.mtime_s != identity_.mtime_s || now.mtime_ns != identity_.mtime_ns) {
    return absl::DataLossError(absl::StrCat(path_.native(), " was written to since it was opened"));
  }
  return absl::OkStatus();
}

absl::Status MappedFile::LostBytes(absl::string_view what) const {
  const absl::Status changed = CheckUnchanged();
  return absl::DataLossError(
      absl::StrCat("cannot read ", what, ": ",
                   changed.ok() ? absl::StrCat("the disk of ", path_.native(), " fails")
                                : std::string(changed.message())));
}

absl::Status MappedFile::Read(std::byte* to, const std::byte* from, int64_t bytes,
                              absl::string_view what) const {
  if (!GuardedCopy(to, from, bytes) || !CheckUnchanged().ok()) return LostBytes(what);
  return absl::OkStatus();
}

}  // namespace dlo
