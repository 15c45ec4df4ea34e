#include "loader/hwr/digest_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <ctime>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/atomic_file.h"
#include "base/json.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "loader/hwr/folder_io.h"
#include "loader/hwr/identity.h"
#include "loader/hwr/strict_json.h"
#include "nlohmann/json.hpp"

namespace dlo::hwr {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kSchema = 1;
constexpr size_t kEntryBytesMax = 4096;
// A file that was written to within the resolution of its times may be written to again and keep
// them: no digest is kept until they are older than any clock tick of a kernel.
constexpr int64_t kSettledNs = 100'000'000;

json Body(const FileStat& stat, const std::string& digest) {
  return {{"schema", kSchema}, {"device", stat.device},     {"inode", stat.inode},
          {"size", stat.size}, {"mtime_ns", stat.mtime_ns}, {"ctime_ns", stat.ctime_ns},
          {"content", digest}};
}

std::string Entry(const FileStat& stat, const std::string& digest) {
  json entry = Body(stat, digest);
  entry["check"] = Sha256Of(entry.dump());
  return entry.dump();
}

}  // namespace

fs::path DigestCache::EntryOf(const fs::path& file) const {
  return folder_ / absl::StrCat(Sha256Of(file.native()), ".json");
}

std::optional<std::string> DigestCache::Find(const fs::path& file, const FileStat& stat) const {
  const int fd = open(EntryOf(file).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return std::nullopt;
  const absl::Cleanup close_fd = [fd] { close(fd); };
  struct stat info;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_uid != geteuid() ||
      (info.st_mode & 022) != 0 || info.st_size > static_cast<off_t>(kEntryBytesMax)) {
    return std::nullopt;
  }
  std::string text(info.st_size, '\0');
  if (pread(fd, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    return std::nullopt;
  }
  const absl::StatusOr<json> entry = ParseJson(text, "entry");
  if (!entry.ok() || !entry->is_object()) return std::nullopt;
  const auto content = entry->find("content");
  if (content == entry->end() || !content->is_string()) return std::nullopt;
  std::string digest = content->get<std::string>();
  // An entry for the same path is exactly the one that would be written now, or another file's.
  if (!IsDigest(digest) || text != Entry(stat, digest)) return std::nullopt;
  return digest;
}

absl::StatusOr<Descriptor> DigestCache::Claim(const fs::path& file, absl::Time deadline) const {
  if (options_.read_only) return absl::FailedPreconditionError("the cache is read-only");
  mkdir(folder_.c_str(), 0700);
  // The lock is on the entry itself, empty until its digest is known.
  Descriptor entry(
      open(EntryOf(file).c_str(), O_RDONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
  if (!entry) return IoError("cannot open an entry");
  RETURN_IF_ERROR(Lock(entry.get(), LockKind::kExclusive, deadline));
  // Whoever had it has replaced the entry, or taken it away.
  struct stat info;
  if (fstat(entry.get(), &info) != 0 || info.st_nlink == 0) {
    return absl::FailedPreconditionError("it was claimed before");
  }
  return entry;
}

void DigestCache::Keep(const fs::path& file, const FileStat& stat,
                       const std::string& digest) const {
  if (options_.read_only) return;
  mkdir(folder_.c_str(), 0700);
  const fs::path entry = EntryOf(file);
  if (!TryKeep(entry, stat, digest)) unlink(entry.c_str());
}

bool DigestCache::TryKeep(const fs::path& entry, const FileStat& stat,
                          const std::string& digest) const {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  const int64_t now_ns = now.tv_sec * 1'000'000'000 + now.tv_nsec;
  if (now_ns - stat.mtime_ns < kSettledNs || now_ns - stat.ctime_ns < kSettledNs) return false;
  absl::StatusOr<AtomicFile> out =
      AtomicFile::Create(entry, absl::StrCat(entry.native(), ".XXXXXX"), 0600);
  return out.ok() && out->Write(Entry(stat, digest)).ok() && out->Commit().ok();
}

}  // namespace dlo::hwr
