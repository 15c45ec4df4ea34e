// The encoded video of a job on the disk, written once and read by any number of clients.
//
//   ASSIGN_OR_RETURN(AtomicFile file, CreateResult("/data/results/a.result"));
//   ASSIGN_OR_RETURN(ResultReader reader, ResultReader::Open("/data/results/a.result"));
//
// A reader goes on reading after its file was removed. Move-only; one thread at a time. Errors as
// in base/atomic_file.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/atomic_file.h"

namespace dlo {

// How the temporary files end.
inline constexpr char kPartialSuffix[] = ".partial";

// Bytes for `path`. No two of this process share a temporary file.
absl::StatusOr<AtomicFile> CreateResult(const std::filesystem::path& path);

class ResultReader {
 public:
  // NOT_FOUND if there is no such file.
  static absl::StatusOr<ResultReader> Open(const std::filesystem::path& path);

  ResultReader(ResultReader&& other) noexcept;
  ResultReader& operator=(ResultReader&&) = delete;
  ~ResultReader();

  int64_t size_bytes() const { return size_bytes_; }

  // From `offset`, at most `bytes_max`; fewer only at the end.
  absl::StatusOr<std::string> Read(int64_t offset, int64_t bytes_max) const;

 private:
  ResultReader(std::filesystem::path path, int fd, int64_t size_bytes)
      : path_(std::move(path)), fd_(fd), size_bytes_(size_bytes) {}

  std::filesystem::path path_;
  int fd_ = -1;
  int64_t size_bytes_ = 0;
};

}  // namespace dlo
