#include "server/result_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dlo {
namespace {

absl::Status FileError(absl::string_view what, const std::filesystem::path& path) {
  const int code = errno;
  const std::string message = absl::StrCat(what, " ", path.string(), ": ", strerror(code));
  if (code == ENOSPC || code == EDQUOT || code == EFBIG) {
    return absl::ResourceExhaustedError(message);
  }
  if (code == ENOENT) return absl::NotFoundError(message);
  return absl::InternalError(message);
}

}  // namespace

absl::StatusOr<ResultWriter> ResultWriter::Create(const std::filesystem::path& path) {
  static std::atomic<uint64_t> next = 0;
  std::string temporary =
      (path.parent_path() / absl::StrCat(getpid(), ".", next++, kPartialSuffix)).string();
  const int fd = open(temporary.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  if (fd < 0) return FileError("cannot create", temporary);
  return ResultWriter(path, std::move(temporary), fd);
}

ResultWriter::ResultWriter(ResultWriter&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      fd_(std::exchange(other.fd_, -1)),
      size_bytes_(other.size_bytes_),
      hash_(std::move(other.hash_)) {}

ResultWriter::~ResultWriter() {
  if (fd_ >= 0) close(fd_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

absl::Status ResultWriter::Write(absl::string_view bytes) {
  hash_.Update(bytes);
  size_bytes_ += static_cast<int64_t>(bytes.size());
  while (!bytes.empty()) {
    const ssize_t written = write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FileError("cannot write", temporary_);
    bytes.remove_prefix(written);
  }
  return absl::OkStatus();
}

absl::Status ResultWriter::Commit() {
  if (fsync(fd_) != 0) return FileError("cannot flush", temporary_);
  if (close(std::exchange(fd_, -1)) != 0) return FileError("cannot close", temporary_);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) return FileError("cannot rename to", path_);
  temporary_.clear();
  // The name itself must reach the disk too.
  const int folder = open(path_.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return FileError("cannot open", path_.parent_path());
  const bool flushed = fsync(folder) == 0;
  const absl::Status status =
      flushed ? absl::OkStatus() : FileError("cannot flush", path_.parent_path());
  close(folder);
  return status;
}

absl::StatusOr<ResultReader> ResultReader::Open(const std::filesystem::path& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return FileError("cannot open", path);
  struct stat info;
  if (fstat(fd, &info) != 0) {
    absl::Status status = FileError("cannot read", path);
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
    if (got < 0) return FileError("cannot read", path_);
    if (got == 0) return absl::DataLossError(absl::StrCat(path_.string(), " was cut"));
    filled += got;
  }
  return bytes;
}

}  // namespace dlo
