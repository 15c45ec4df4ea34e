// A file mapped read-only and shared, and whether it still is the file that was mapped.
//
//   ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open("model.safetensors"));
//   std::vector<std::byte> copy(n);
//   RETURN_IF_ERROR(file.Read(copy.data(), file.bytes().data() + offset, n, "blocks.3.to_q"));
//
// Processes that map one file share its pages. Somebody may write to the file or cut it meanwhile:
// Read notices both; whoever reads bytes() directly gets SIGBUS for bytes that are gone.
//
// Move-only; the bytes stay where they are when the object moves. const members may be called from
// any thread. Errors of Open name the file: INVALID_ARGUMENT for anything but a file with content,
// NOT_FOUND, PERMISSION_DENIED and the like from the operating system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

struct stat;

namespace dlo {

class MappedFile {
 public:
  static absl::StatusOr<MappedFile> Open(const std::filesystem::path& path);
  // Maps an open file, whose descriptor it keeps a copy of: the file may be renamed or unlinked
  // later and still is the one that was mapped. `path` is for messages.
  static absl::StatusOr<MappedFile> Map(int fd, const std::filesystem::path& path);

  MappedFile() = default;  // maps nothing
  MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  const std::filesystem::path& path() const { return path_; }
  absl::Span<const std::byte> bytes() const { return bytes_; }

  // DATA_LOSS, saying what happened, unless the path (of Map: the descriptor) leads to the same
  // file (device and inode) with the size and modification time of when it was mapped. Bytes copied
  // out before a call that returns OK are those of the file that was mapped. One system call;
  // allocates nothing if OK.
  absl::Status CheckUnchanged() const;

  // DATA_LOSS naming `what` and the file: for a copy out of bytes() that failed.
  absl::Status LostBytes(absl::string_view what) const;

  // Copies part of bytes(). DATA_LOSS, naming `what` and the file, if it is not there any more or
  // the file is another one by now.
  absl::Status Read(std::byte* to, const std::byte* from, int64_t bytes,
                    absl::string_view what) const;

 private:
  struct Identity {
    uint64_t device = 0;
    uint64_t inode = 0;
    int64_t size = 0;
    int64_t mtime_s = 0;
    int64_t mtime_ns = 0;
  };
  static Identity IdentityOf(const struct ::stat& info);
  static absl::StatusOr<MappedFile> MapChecked(int fd, const std::filesystem::path& path);

  std::filesystem::path path_;
  absl::Span<const std::byte> bytes_;
  Identity identity_;
  int fd_ = -1;  // of Map
};

}  // namespace dlo
