// Safetensors files: a reader over a read-only shared mapping that trusts nothing in the file, and
// a writer.
//
//   ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open("model.safetensors"));
//   for (const auto& [name, entry] : file.tensors()) Use(name, entry.shape, file.data(entry));
//
// Format (https://github.com/huggingface/safetensors): eight bytes of little-endian header length
// n, n bytes of JSON that map each tensor's name to {dtype, shape, data_offsets} (and
// "__metadata__" to strings), then the data, which the tensors cover without gap or overlap.
// Stricter than the reference: a duplicate key is refused even when both entries are equal.
//
// A header length need not be a multiple of 8, so data may be misaligned: copy elements out, never
// cast the pointer.
//
// Thread-safety: const members may be called from any thread. Ownership: spans point into the
// mapping and live as long as the SafetensorsFile (moving it keeps them valid). Errors:
// INVALID_ARGUMENT names the file, the tensor and what is wrong; NOT_FOUND, PERMISSION_DENIED and
// the like come from the operating system. A file that shrinks while it is mapped raises SIGBUS on
// access; see base/mapped_file.h for reading that notices it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/dtype.h"
#include "base/mapped_file.h"

namespace dlo {

struct SafetensorsEntry {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;  // row-major, contiguous; a zero-element tensor is legal
  int64_t offset = 0;          // of the first byte, from the start of the file
  int64_t bytes = 0;
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry> tensors;
  std::map<std::string, std::string> metadata;  // "__metadata__"
};

// Parses and checks the header of a file of `file_size` bytes. `prefix` holds the file's first
// bytes, at least up to the end of the header (fewer bytes count as a truncated file). `name` is
// used in messages only. Pure: reads nothing but `prefix`.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::Span<const std::byte> prefix,
                                                         int64_t file_size, absl::string_view name);

class SafetensorsFile {
 public:
  static absl::StatusOr<SafetensorsFile> Open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return mapping_.path(); }
  int64_t size_bytes() const { return static_cast<int64_t>(mapping_.bytes().size()); }
  const MappedFile& mapping() const { return mapping_; }
  const std::map<std::string, SafetensorsEntry>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }

  // The bytes of one of this file's own entries.
  absl::Span<const std::byte> data(const SafetensorsEntry& entry) const {
    return mapping_.bytes().subspan(static_cast<size_t>(entry.offset),
                                    static_cast<size_t>(entry.bytes));
  }

 private:
  SafetensorsFile() = default;

  MappedFile mapping_;
  SafetensorsHeader header_;
};

// One tensor to write. `data` must hold exactly the bytes that shape and dtype ask for.
struct SafetensorsTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  absl::Span<const std::byte> data;
};

// The length and header of a file whose tensors follow each other in the order given, padded so
// that the data starts at a multiple of 64 bytes. Looks at name, dtype and shape only (`data` may
// be empty): write it, then each tensor's bytes as they come into being. INVALID_ARGUMENT: a name
// twice, empty, not UTF-8 or "__metadata__", or a shape that is negative or overflows.
absl::StatusOr<std::string> SafetensorsPreamble(
    absl::Span<const SafetensorsTensor> tensors,
    const std::map<std::string, std::string>& metadata = {});

// Writes a whole file without assembling it in memory. It appears at `path` complete or not at all.
absl::Status WriteSafetensors(const std::filesystem::path& path,
                              absl::Span<const SafetensorsTensor> tensors,
                              const std::map<std::string, std::string>& metadata = {});

}  // namespace dlo
