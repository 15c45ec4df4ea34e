// The file that a command writes: complete under its name, or not there.
//
//   ASSIGN_OR_RETURN(OutputFile file, OutputFile::Create("video.mp4"));
//   RETURN_IF_ERROR(file.Write(chunk));
//   RETURN_IF_ERROR(file.Commit(sha256));
//
// Bytes go to a hidden temporary in the same folder. Commit checks the hash and puts the file in
// place; destruction without Commit removes the temporary, but for one that Keep left for the next
// Resume. Move-only; one thread at a time. Errors as in base/atomic_file.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/atomic_file.h"
#include "media/video_writer.h"

namespace dlo {

// The format that a file's ending asks for: .mp4, .png or .safetensors, in any case.
// INVALID_ARGUMENT for another one.
absl::StatusOr<VideoFormat> FormatOfPath(const std::filesystem::path& path);

class OutputFile {
 public:
  static absl::StatusOr<OutputFile> Create(const std::filesystem::path& path);

  // With what an earlier process kept of the file whose SHA-256 (hexadecimal) this is and which has
  // `bytes_max` bytes; anew where that is more.
  static absl::StatusOr<OutputFile> Resume(const std::filesystem::path& path,
                                           absl::string_view sha256, int64_t bytes_max);

  const std::filesystem::path& path() const { return file_.path(); }
  const std::filesystem::path& temporary() const { return file_.temporary(); }
  int64_t size_bytes() const { return file_.size_bytes(); }

  absl::Status Write(absl::string_view bytes) { return file_.Write(bytes); }

  // DATA_LOSS, and no file, if the bytes do not have this SHA-256 (hexadecimal).
  absl::Status Commit(absl::string_view sha256);

  // For the next Resume; no more calls.
  void Keep() { file_.Keep(); }

 private:
  explicit OutputFile(AtomicFile file) : file_(std::move(file)) {}

  AtomicFile file_;
};

}  // namespace dlo
