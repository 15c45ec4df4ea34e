// Digests of files by absolute path, kept in a folder that processes share.
//
//   DigestCache cache(root / "source-digests", {.deadline = absl::Now() + absl::Minutes(1)});
//   if (auto digest = cache.Find(path, stat)) return *digest;
//   const absl::StatusOr<Descriptor> claim = cache.Claim(path, cache.deadline());
//   if (auto digest = cache.Find(path, stat)) return *digest;  // of who had the claim before
//   cache.Keep(path, stat, Hash(path));
//
// A digest is believed only as long as the file's FileStat stands. Any failure of the cache means
// that a file is hashed, no more. Thread-safe, and so are processes against each other.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "loader/hwr/descriptor.h"

namespace dlo::hwr {

// What tells one state of a file from another.
struct FileStat {
  uint64_t device = 0;
  uint64_t inode = 0;
  int64_t size = 0;
  int64_t mtime_ns = 0;
  int64_t ctime_ns = 0;
  bool operator==(const FileStat&) const = default;
};

struct DigestCacheOptions {
  bool read_only = false;  // what is known is found, and nothing is kept or claimed
  absl::Time deadline = absl::InfiniteFuture();  // of waiting for others' claims
};

class DigestCache {
 public:
  // The folder is created, with mode 0700, when it is first written to; its parent must be there.
  explicit DigestCache(std::filesystem::path folder, const DigestCacheOptions& options = {})
      : folder_(std::move(folder)), options_(options) {}

  const std::filesystem::path& folder() const { return folder_; }
  absl::Time deadline() const { return options_.deadline; }

  std::optional<std::string> Find(const std::filesystem::path& file, const FileStat& stat) const;

  // The right to hash the file for everybody: had by one, as long as what is returned lives and no
  // longer than its process. DEADLINE_EXCEEDED while somebody else has it; after any other error
  // there is nobody to wait for.
  absl::StatusOr<Descriptor> Claim(const std::filesystem::path& file, absl::Time deadline) const;

  // What cannot be kept, such as the digest of a file that has changed just now, is forgotten: who
  // waits for it then hashes the file, too, and all of them at once.
  void Keep(const std::filesystem::path& file, const FileStat& stat,
            const std::string& digest) const;

 private:
  std::filesystem::path EntryOf(const std::filesystem::path& file) const;
  bool TryKeep(const std::filesystem::path& entry, const FileStat& stat,
               const std::string& digest) const;

  const std::filesystem::path folder_;
  const DigestCacheOptions options_;
};

}  // namespace dlo::hwr
