// What the files of a checkpoint contain, as a digest, and whether they still are those files.
//
//   const DigestCache cache = store->digests(deadline);
//   ASSIGN_OR_RETURN(SourceFingerprint sources,
//                    FingerprintSources({{"vae", files}}, {.cache = &cache}));
//   IdentityInputs inputs = {.source = sources.digest()};
//   ...
//   RETURN_IF_ERROR(sources.CheckUnchanged());
//
// The digest covers for each component the relative name, size and SHA-256 of each of its files;
// paths are not in it, so a copy of a checkpoint has the digest of the original.
//
// Files are hashed by several threads, unless a content is known: from the digest cache, or, for a
// model named by its hub id, from the name of the blob that a snapshot's link leads to, which in a
// hub cache is the SHA-256 of its content. A link that merely looks like one is never trusted.
// Processes with one cache share the work. Stateless; any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "loader/hwr/digest_cache.h"

namespace dlo::hwr {

// One component's weight files.
struct SourceFiles {
  std::string component;
  std::filesystem::path folder;    // that the names are relative to
  std::vector<std::string> names;  // "diffusion_pytorch_model.safetensors"
};

struct FingerprintOptions {
  // The model was named by a hub id, not by a folder: blob names may be trusted.
  bool from_hub = false;
  const DigestCache* cache = nullptr;
  int threads = 8;
};

class SourceFingerprint {
 public:
  SourceFingerprint() = default;

  // 64 hexadecimal digits.
  const std::string& digest() const { return digest_; }
  int64_t bytes() const { return bytes_; }                // of all files
  int64_t bytes_hashed() const { return bytes_hashed_; }  // of those that had to be read
  int num_files() const { return static_cast<int>(guard_.size()); }

  // FAILED_PRECONDITION, naming the file, unless each file has the device, inode, size, times of
  // modification and change, and the link the target, of when it was fingerprinted.
  absl::Status CheckUnchanged() const;

 private:
  struct Guarded {
    std::filesystem::path path;
    FileStat stat;
    std::string link;  // target; empty: no link
  };

  friend absl::StatusOr<SourceFingerprint> FingerprintSources(absl::Span<const SourceFiles> sources,
                                                              const FingerprintOptions& options);

  std::string digest_;
  int64_t bytes_ = 0;
  int64_t bytes_hashed_ = 0;
  std::vector<Guarded> guard_;
};

// NOT_FOUND for a file that is missing, INVALID_ARGUMENT for one that is no regular file or whose
// name leaves its folder, FAILED_PRECONDITION for one that changed meanwhile; else as the operating
// system says.
absl::StatusOr<SourceFingerprint> FingerprintSources(absl::Span<const SourceFiles> sources,
                                                     const FingerprintOptions& options = {});

}  // namespace dlo::hwr
