// A file that appears under its name only when it is complete.
//
//   ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create("/data/a.mp4", "/data/.a.part", 0600));
//   RETURN_IF_ERROR(file.Write(chunk));
//   RETURN_IF_ERROR(file.Commit());   // now, and only now, the file has its name
//
// Bytes are in the temporary file, which must be in the same folder, until Commit has flushed and
// renamed it, replacing a file of that name, and flushed the folder. Destruction without Commit
// removes it, unless Keep was called: then Resume goes on with it, in another process perhaps.
//
// Move-only; one thread at a time. Errors name the path and the reason; RESOURCE_EXHAUSTED when
// there is no room (disk full, quota, size limit of the process).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/sha256.h"

namespace dlo {

class AtomicFile {
 public:
  // Empties a temporary file that is there. One whose name ends in XXXXXX gets a name that nobody
  // else has.
  static absl::StatusOr<AtomicFile> Create(std::filesystem::path path,
                                           const std::filesystem::path& temporary, mode_t mode);
  // With what a temporary file that is there holds; it is read once, for the hash. UNAVAILABLE
  // while another AtomicFile resumes it.
  static absl::StatusOr<AtomicFile> Resume(std::filesystem::path path,
                                           const std::filesystem::path& temporary, mode_t mode);

  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;
  ~AtomicFile();

  const std::filesystem::path& path() const { return path_; }
  // Empty after Commit.
  const std::filesystem::path& temporary() const { return temporary_; }
  int64_t size_bytes() const { return size_bytes_; }

  absl::Status Write(absl::string_view bytes);
  // Starts anew.
  absl::Status Truncate();
  // Of all bytes, hexadecimal; once, after the last Write.
  std::string Sha256Hex() { return hash_.Finish(); }
  absl::Status Commit();
  // Leaves the temporary file where it is; no more calls.
  void Keep();

 private:
  AtomicFile(std::filesystem::path path, std::filesystem::path temporary, int fd)
      : path_(std::move(path)), temporary_(std::move(temporary)), fd_(fd) {}

  absl::Status HashWhatIsThere();

  std::filesystem::path path_;
  std::filesystem::path temporary_;  // empty: nothing to remove
  int fd_ = -1;
  int64_t size_bytes_ = 0;
  Sha256 hash_;
};

// Of the operating system's last error: "PATH: WHAT: No space left on device".
absl::Status FileError(const std::filesystem::path& path, absl::string_view what);

}  // namespace dlo
