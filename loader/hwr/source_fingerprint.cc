#include "loader/hwr/source_fingerprint.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <tuple>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "loader/chunk_threads.h"
#include "loader/hwr/identity.h"
#include "loader/hwr/strict_json.h"
#include "nlohmann/json.hpp"

namespace dlo::hwr {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr size_t kReadBytes = size_t{8} << 20;
constexpr int kThreadsMax = 64;

FileStat StatOf(const struct stat& info) {
  return {.device = info.st_dev,
          .inode = info.st_ino,
          .size = info.st_size,
          .mtime_ns = info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec,
          .ctime_ns = info.st_ctim.tv_sec * 1'000'000'000 + info.st_ctim.tv_nsec};
}

absl::Status Changed(const fs::path& path) {
  return absl::FailedPreconditionError(absl::StrCat(path.native(), " changed while it was in use"));
}

bool IsHex(absl::string_view text, size_t length) {
  return text.size() == length && text.find_first_not_of("0123456789abcdef") == text.npos;
}

// The target of a link; empty for anything else.
std::string LinkTarget(const fs::path& path) {
  std::error_code error;
  const fs::path target = fs::read_symlink(path, error);
  return error ? "" : target.native();
}

// The repository's folder of a path below ".../models--ORG--NAME/snapshots/COMMIT"; empty for other
// paths.
fs::path HubRepository(const fs::path& path) {
  fs::path repository;
  std::vector<std::string> parts;
  for (const fs::path& part : path) parts.push_back(part.native());
  for (size_t i = 0; i + 2 < parts.size(); ++i) {
    if (absl::StartsWith(parts[i], "models--") && parts[i + 1] == "snapshots" &&
        (IsHex(parts[i + 2], 40) || IsHex(parts[i + 2], 64))) {
      for (size_t j = 0; j <= i; ++j) repository /= parts[j];
      return repository;
    }
  }
  return {};
}

// The SHA-256 that the blob's name states, where a link of a hub snapshot leads to a blob of the
// same repository.
std::optional<std::string> BlobDigest(const fs::path& path) {
  std::error_code error;
  const fs::path absolute = fs::absolute(path, error).lexically_normal();
  if (error || !fs::is_symlink(absolute, error) || error) return std::nullopt;
  const fs::path repository = HubRepository(absolute);
  if (repository.empty()) return std::nullopt;
  const fs::path target = fs::canonical(absolute, error);
  if (error) return std::nullopt;
  const fs::path blobs = fs::canonical(repository / "blobs", error);
  if (error || target.parent_path() != blobs) return std::nullopt;
  // Names of 40 digits are git's: of small files, and no digest of the content alone.
  const std::string name = target.filename().native();
  return IsHex(name, 64) ? std::optional(name) : std::nullopt;
}

struct SourceFile {
  size_t component = 0;
  std::string name;
  fs::path path;
  FileStat stat;
  std::string link;
  std::string digest;
  bool hashed = false;
};

// Without `wait` a file that another process is hashing is left as it is, without a digest.
absl::Status Fingerprint(const FingerprintOptions& options, bool wait, SourceFile* file) {
  file->link = LinkTarget(file->path);
  // O_NONBLOCK: a FIFO in the file's place must not hang the open.
  const int fd = open(file->path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", file->path.native()));
  const absl::Cleanup close_fd = [fd] { close(fd); };
  struct stat info;
  if (fstat(fd, &info) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot stat ", file->path.native()));
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(file->path.native(), ": not a regular file"));
  }
  file->stat = StatOf(info);

  if (options.from_hub) {
    if (std::optional<std::string> blob = BlobDigest(file->path)) {
      file->digest = *std::move(blob);
      return absl::OkStatus();
    }
  }
  // Held until the digest is kept.
  absl::StatusOr<Descriptor> claim;
  if (options.cache != nullptr) {
    const auto find = [&] {
      std::optional<std::string> known = options.cache->Find(file->path, file->stat);
      if (known) file->digest = *std::move(known);
      return !file->digest.empty();
    };
    if (find()) return absl::OkStatus();
    claim =
        options.cache->Claim(file->path, wait ? options.cache->deadline() : absl::InfinitePast());
    if (!wait && absl::IsDeadlineExceeded(claim.status())) return absl::OkStatus();
    if (find()) return absl::OkStatus();
  }
  Sha256 hash;
  std::vector<char> buffer(kReadBytes);
  while (true) {
    const ssize_t got = read(fd, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot read ", file->path.native()));
    }
    if (got == 0) break;
    hash.Update(absl::string_view(buffer.data(), got));
  }
  if (fstat(fd, &info) != 0 || StatOf(info) != file->stat) return Changed(file->path);
  file->digest = hash.Finish();
  file->hashed = true;
  if (options.cache != nullptr) options.cache->Keep(file->path, file->stat, file->digest);
  return absl::OkStatus();
}

// First what nobody else hashes, then the rest, which by then is mostly known. One failure of all:
// in each of the two the first in the order of the files.
absl::Status FingerprintAll(const FingerprintOptions& options, std::vector<SourceFile>* files) {
  for (const bool wait : {false, true}) {
    std::vector<SourceFile*> unknown;
    for (SourceFile& file : *files) {
      if (file.digest.empty()) unknown.push_back(&file);
    }
    const absl::StatusOr<int> threads = RunChunks(
        static_cast<int64_t>(unknown.size()), std::clamp(options.threads, 1, kThreadsMax),
        "hashing weight files", [&](int64_t i) { return Fingerprint(options, wait, unknown[i]); });
    RETURN_IF_ERROR(threads.status());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<SourceFile>> ListFiles(absl::Span<const SourceFiles> sources) {
  std::vector<SourceFile> files;
  for (size_t c = 0; c < sources.size(); ++c) {
    for (const std::string& name : sources[c].names) {
      const fs::path relative(name);
      const bool inside = !name.empty() && relative.is_relative() &&
                          relative.lexically_normal() == relative && *relative.begin() != "..";
      if (!inside) {
        return absl::InvalidArgumentError(absl::StrCat(sources[c].component, ": ",
                                                       JsonExcerpt(name), " is no file of ",
                                                       sources[c].folder.native()));
      }
      std::error_code error;
      fs::path path = fs::absolute(sources[c].folder / relative, error);
      files.push_back({.component = c, .name = name, .path = path.lexically_normal()});
    }
  }
  return files;
}

}  // namespace

absl::Status SourceFingerprint::CheckUnchanged() const {
  for (const Guarded& file : guard_) {
    struct stat info;
    if (stat(file.path.c_str(), &info) != 0 || StatOf(info) != file.stat ||
        LinkTarget(file.path) != file.link) {
      return Changed(file.path);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<SourceFingerprint> FingerprintSources(absl::Span<const SourceFiles> sources,
                                                     const FingerprintOptions& options) {
  ASSIGN_OR_RETURN(std::vector<SourceFile> files, ListFiles(sources));
  RETURN_IF_ERROR(FingerprintAll(options, &files));

  std::sort(files.begin(), files.end(), [&](const SourceFile& a, const SourceFile& b) {
    return std::tie(sources[a.component].component, a.name) <
           std::tie(sources[b.component].component, b.name);
  });
  SourceFingerprint result;
  json list = json::array();
  for (const SourceFile& file : files) {
    list.push_back({{"component", sources[file.component].component},
                    {"name", file.name},
                    {"bytes", file.stat.size},
                    {"content", absl::StrCat("sha256:", file.digest)}});
    result.bytes_ += file.stat.size;
    if (file.hashed) result.bytes_hashed_ += file.stat.size;
    result.guard_.push_back({file.path, file.stat, file.link});
  }
  ASSIGN_OR_RETURN(const std::string document, CanonicalJson({{"schema", 1}, {"files", list}}));
  result.digest_ = Sha256Of(document);
  RETURN_IF_ERROR(result.CheckUnchanged());
  return result;
}

}  // namespace dlo::hwr
