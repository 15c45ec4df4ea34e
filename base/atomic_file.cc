#include "base/atomic_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace dlo {
namespace {

constexpr size_t kReadBytes = size_t{1} << 20;

std::filesystem::path FolderOf(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

}  // namespace

absl::Status FileError(const std::filesystem::path& path, absl::string_view what) {
  const int code = errno;
  const std::string message = absl::StrCat(path.string(), ": ", what);
  if (code == EFBIG) {
    return absl::ResourceExhaustedError(absl::StrCat(message, ": ", strerror(code)));
  }
  return absl::ErrnoToStatus(code, message);
}

absl::StatusOr<AtomicFile> AtomicFile::Create(std::filesystem::path path,
                                              const std::filesystem::path& temporary, mode_t mode) {
  std::string name = temporary.string();
  const bool unique = absl::EndsWith(name, "XXXXXX");
  const int fd = unique ? mkostemp(name.data(), O_CLOEXEC)
                        : open(name.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, mode);
  if (fd < 0) return FileError(path, "cannot be created");
  AtomicFile file(std::move(path), std::move(name), fd);
  if (unique && fchmod(fd, mode) != 0) return FileError(file.path_, "cannot be created");
  return file;
}

absl::StatusOr<AtomicFile> AtomicFile::Resume(std::filesystem::path path,
                                              const std::filesystem::path& temporary, mode_t mode) {
  const int fd = open(temporary.c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, mode);
  if (fd < 0) return FileError(path, "cannot be created");
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    close(fd);
    return absl::UnavailableError(
        absl::StrCat(path.string(), ": another process is writing ", temporary.string()));
  }
  AtomicFile file(std::move(path), temporary, fd);
  // The lock may be that of a file which another process has put in place meanwhile.
  struct stat ours{};
  struct stat there{};
  if (fstat(fd, &ours) != 0 || stat(temporary.c_str(), &there) != 0 ||
      ours.st_ino != there.st_ino) {
    file.temporary_.clear();
    return absl::UnavailableError(
        absl::StrCat(file.path_.string(), ": another process is writing ", temporary.string()));
  }
  RETURN_IF_ERROR(file.HashWhatIsThere());
  return file;
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      fd_(std::exchange(other.fd_, -1)),
      size_bytes_(other.size_bytes_),
      hash_(std::move(other.hash_)) {}

AtomicFile::~AtomicFile() {
  // Before the lock is gone.
  if (!temporary_.empty()) unlink(temporary_.c_str());
  if (fd_ >= 0) close(fd_);
}

absl::Status AtomicFile::HashWhatIsThere() {
  std::vector<char> bytes(kReadBytes);
  while (true) {
    const ssize_t got = read(fd_, bytes.data(), bytes.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FileError(temporary_, "cannot be read");
    if (got == 0) return absl::OkStatus();
    hash_.Update(absl::string_view(bytes.data(), got));
    size_bytes_ += got;
  }
}

absl::Status AtomicFile::Write(absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FileError(path_, "cannot be written");
    hash_.Update(bytes.substr(0, written));
    size_bytes_ += written;
    bytes.remove_prefix(written);
  }
  return absl::OkStatus();
}

absl::Status AtomicFile::Truncate() {
  if (ftruncate(fd_, 0) != 0 || lseek(fd_, 0, SEEK_SET) != 0) {
    return FileError(path_, "cannot be written");
  }
  hash_ = Sha256();
  size_bytes_ = 0;
  return absl::OkStatus();
}

absl::Status AtomicFile::Commit() {
  if (fsync(fd_) != 0) return FileError(path_, "cannot be flushed");
  if (rename(temporary_.c_str(), path_.c_str()) != 0)
    return FileError(path_, "cannot be put in place");
  temporary_.clear();
  if (close(std::exchange(fd_, -1)) != 0) return FileError(path_, "cannot be written");
  // The name itself must reach the disk too.
  const int folder = open(FolderOf(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) {
    // One may be allowed to write into it and not to read it.
    return errno == EACCES ? absl::OkStatus() : FileError(FolderOf(path_), "cannot be opened");
  }
  const absl::Status status = fsync(folder) == 0 || errno == EINVAL  // a file system without
                                  ? absl::OkStatus()
                                  : FileError(FolderOf(path_), "cannot be flushed");
  close(folder);
  return status;
}

void AtomicFile::Keep() {
  temporary_.clear();
  close(std::exchange(fd_, -1));
}

}  // namespace dlo
