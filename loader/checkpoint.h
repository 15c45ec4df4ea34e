// The weights of one component of a diffusers repository: one safetensors file, or several joined
// by an index.
//
//   ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(root / "transformer"));
//   if (auto source = checkpoint.Find("patch_embedding.weight")) {
//     Use(source->dtype, source->shape, source->data);
//   }
//
// The folder holds diffusion_pytorch_model.safetensors or model.safetensors, or one of these names
// with ".index.json" appended (then `weight_map` names a shard of any name inside the folder for
// each tensor, and must agree with the shards exactly).
//
// Thread-safety: const members may be called from any thread. Ownership: everything in a
// TensorSource lives as long as the Checkpoint (moving it keeps it valid). Errors: INVALID_ARGUMENT
// names file and tensor; NOT_FOUND names the files looked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/dtype.h"
#include "loader/safetensors.h"

namespace dlo {

struct TensorSource {
  DType dtype = DType::kF32;
  absl::Span<const int64_t> shape;
  absl::Span<const std::byte> data;     // maybe misaligned
  absl::string_view file;               // path of the file that holds it
  absl::string_view name;               // the tensor's there
  const MappedFile* mapping = nullptr;  // of that file
};

// The `weight_map` of an index file: tensor name -> file name inside the folder. `name` is used in
// messages only. INVALID_ARGUMENT for anything that is not such an index, a duplicate key, or a
// file name that leaves the folder.
absl::StatusOr<std::map<std::string, std::string>> ParseSafetensorsIndex(absl::string_view json,
                                                                         absl::string_view name);

class Checkpoint {
 public:
  static absl::StatusOr<Checkpoint> Open(const std::filesystem::path& component_dir);

  const std::filesystem::path& dir() const { return dir_; }
  const std::vector<SafetensorsFile>& files() const { return files_; }

  std::optional<TensorSource> Find(absl::string_view name) const;
  std::vector<std::string> names() const;  // sorted

 private:
  struct Location {
    size_t file = 0;  // index into files_
    const SafetensorsEntry* entry = nullptr;
  };

  std::filesystem::path dir_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, Location, std::less<>> tensors_;
};

}  // namespace dlo
