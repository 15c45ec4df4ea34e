// The encoded video of a job on the disk, written once and read by any number of clients.
//
//   ASSIGN_OR_RETURN(ResultWriter writer, ResultWriter::Create("/data/results/a.result"));
//   RETURN_IF_ERROR(writer.Write(chunk));
//   RETURN_IF_ERROR(writer.Commit());   // now, and only now, the file has its name
//
// A writer's bytes are in a temporary file of the same folder until Commit has flushed and renamed
// it and flushed the folder; destruction without Commit removes it. A reader goes on reading after
// its file was removed. Both are move-only; one thread at a time. Errors name the path and the
// reason; RESOURCE_EXHAUSTED when there is no room (disk full, quota, size limit of the process).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "media/sha256.h"

namespace dlo {

// How the temporary files end.
inline constexpr char kPartialSuffix[] = ".partial";

class ResultWriter {
 public:
  // Bytes for `path`. No two writers of this process share a temporary file.
  static absl::StatusOr<ResultWriter> Create(const std::filesystem::path& path);

  ResultWriter(ResultWriter&& other) noexcept;
  ResultWriter& operator=(ResultWriter&&) = delete;
  ~ResultWriter();

  int64_t size_bytes() const { return size_bytes_; }

  absl::Status Write(absl::string_view bytes);
  // Of what was written; once.
  std::string Sha256Hex() { return hash_.Finish(); }
  // Replaces a file of that name.
  absl::Status Commit();

 private:
  ResultWriter(std::filesystem::path path, std::string temporary, int fd)
      : path_(std::move(path)), temporary_(std::move(temporary)), fd_(fd) {}

  std::filesystem::path path_;
  std::string temporary_;  // empty: nothing to remove
  int fd_ = -1;
  int64_t size_bytes_ = 0;
  Sha256 hash_;
};

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
