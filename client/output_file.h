// A file that appears under its name only when it is complete.
//
//   ASSIGN_OR_RETURN(OutputFile file, OutputFile::Create("video.mp4"));
//   RETURN_IF_ERROR(file.Write(chunk));
//   RETURN_IF_ERROR(file.Commit(sha256));
//
// Bytes go to a hidden temporary in the same folder. Commit checks the hash, flushes to the disk
// and renames, replacing a file of that name; destruction without Commit removes the temporary.
// Move-only; one thread at a time. Errors name the path and the reason.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "media/sha256.h"
#include "media/video_writer.h"

namespace dlo {

// The format that a file's ending asks for: .mp4, .png or .safetensors, in any case.
// INVALID_ARGUMENT for another one.
absl::StatusOr<VideoFormat> FormatOfPath(const std::filesystem::path& path);

class OutputFile {
 public:
  static absl::StatusOr<OutputFile> Create(const std::filesystem::path& path);

  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  ~OutputFile();

  const std::filesystem::path& path() const { return path_; }
  int64_t size_bytes() const { return size_bytes_; }

  absl::Status Write(absl::string_view bytes);

  // DATA_LOSS, and no file, if the bytes do not have this SHA-256 (hexadecimal).
  absl::Status Commit(absl::string_view sha256);

 private:
  OutputFile(std::filesystem::path path, std::string temporary, int fd)
      : path_(std::move(path)), temporary_(std::move(temporary)), fd_(fd) {}

  std::filesystem::path path_;
  std::string temporary_;  // empty: nothing to remove
  int fd_ = -1;
  int64_t size_bytes_ = 0;
  Sha256 hash_;
};

}  // namespace dlo
