#include "server/result_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dlo {
absl::StatusOr<AtomicFile> CreateResult(const std::filesystem::path& path) {
  static std::atomic<uint64_t> next = 0;
  return AtomicFile::Create(
      path, path.parent_path() / absl::StrCat(getpid(), ".", next++, kPartialSuffix), 0600);
}

absl::StatusOr<ResultReader> ResultReader::Open(const std::filesystem::path& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return FileError(path, "cannot be opened");
  struct stat info;
  if (fstat(fd, &info) != 0) {
    absl::Status status = FileError(path, "cannot be read");
    close(fd);
    return status;
  }
  return ResultReader(path, fd, info.st_size);
}

ResultReader::ResultReader(ResultReader&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      size_bytes_(other.size_bytes_) {}

ResultReader::~ResultReader() {
  if (fd_ >= 0) close(fd_);
}

absl::StatusOr<std::string> ResultReader::Read(int64_t offset, int64_t bytes_max) const {
  std::string bytes(std::min(bytes_max, size_bytes_ - offset), '\0');
  size_t filled = 0;
  while (filled < bytes.size()) {
    const ssize_t got = pread(fd_, bytes.data() + filled, bytes.size() - filled,
                              offset + static_cast<int64_t>(filled));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FileError(path_, "cannot be read");
    if (got == 0) return absl::DataLossError(absl::StrCat(path_.string(), " was cut"));
    filled += got;
  }
  return bytes;
}

}  // namespace dlo
