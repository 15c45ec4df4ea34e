#include "client/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace dlo {
namespace {

absl::Status ErrnoStatus(const std::filesystem::path& path, absl::string_view what) {
  const int code = errno;
  return absl::ErrnoToStatus(code, absl::StrCat(path.string(), ": ", what));
}

std::filesystem::path FolderOf(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

// What open(2) would give; only setting the mask tells it.
mode_t DefaultMode() {
  const mode_t mask = umask(0);
  umask(mask);
  return 0666 & ~mask;
}

}  // namespace

absl::StatusOr<VideoFormat> FormatOfPath(const std::filesystem::path& path) {
  const std::string ending = absl::AsciiStrToLower(path.extension().string());
  if (ending == ".mp4") return VideoFormat::kMp4;
  if (ending == ".png") return VideoFormat::kPngSheet;
  if (ending == ".safetensors") return VideoFormat::kSafetensors;
  return absl::InvalidArgumentError(absl::StrCat(
      "--output ", path.string(), ": the file's ending must be .mp4 (video), .png (contact sheet) ",
      "or .safetensors (lossless frames)"));
}

absl::StatusOr<OutputFile> OutputFile::Create(const std::filesystem::path& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    return absl::InvalidArgumentError(absl::StrCat(path.string(), ": is a folder"));
  }
  std::string temporary =
      (FolderOf(path) / absl::StrCat(".", path.filename().string(), ".XXXXXX")).string();
  const int fd = mkostemp(temporary.data(), O_CLOEXEC);
  if (fd < 0) return ErrnoStatus(path, "cannot be created");
  OutputFile file(path, std::move(temporary), fd);
  if (fchmod(fd, DefaultMode()) != 0) return ErrnoStatus(path, "cannot be created");
  return file;
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      fd_(std::exchange(other.fd_, -1)),
      size_bytes_(other.size_bytes_),
      hash_(std::move(other.hash_)) {}

OutputFile::~OutputFile() {
  if (fd_ >= 0) close(fd_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

absl::Status OutputFile::Write(absl::string_view bytes) {
  hash_.Update(bytes);
  size_bytes_ += static_cast<int64_t>(bytes.size());
  while (!bytes.empty()) {
    const ssize_t written = write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return ErrnoStatus(path_, "cannot be written");
    bytes.remove_prefix(written);
  }
  return absl::OkStatus();
}

absl::Status OutputFile::Commit(absl::string_view sha256) {
  const std::string received = hash_.Finish();
  if (received != absl::AsciiStrToLower(sha256)) {
    return absl::DataLossError(absl::StrCat(path_.string(), ": the ", size_bytes_,
                                            " bytes received have SHA-256 ", received,
                                            ", the server sent ", sha256));
  }
  if (fsync(fd_) != 0) return ErrnoStatus(path_, "cannot be written");
  if (close(std::exchange(fd_, -1)) != 0) return ErrnoStatus(path_, "cannot be written");
  if (rename(temporary_.c_str(), path_.c_str()) != 0) {
    return ErrnoStatus(path_, "cannot be put in place");
  }
  temporary_.clear();
  // The name itself must reach the disk too. Not every file system lets a folder be opened for
  // that.
  const int folder = open(FolderOf(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    fsync(folder);
    close(folder);
  }
  return absl::OkStatus();
}

}  // namespace dlo
