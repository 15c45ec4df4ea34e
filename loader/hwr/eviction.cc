#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "loader/hwr/folder_io.h"
#include "loader/hwr/store_impl.h"
#include "spdlog/spdlog.h"

namespace dlo::hwr {
namespace {

absl::Status CheckKey(const std::string& key) {
  if (IsDigest(key)) return absl::OkStatus();
  return absl::InvalidArgumentError("a key has 64 hexadecimal digits");
}

}  // namespace

absl::Status StoreImpl::CheckRoom(int64_t bytes, Reason* reason) const {
  if (policy.max_store_bytes > 0) {
    const int64_t used = BytesBelow(root_fd.get());
    if (used > policy.max_store_bytes - bytes) {
      *reason = Reason::kStoreLimit;
      return absl::ResourceExhaustedError(absl::StrCat(bytes, " bytes more than the ", used,
                                                       " that are stored would be over ",
                                                       policy.max_store_bytes));
    }
  }
  const int64_t free = ops->FreeBytes(root_fd.get());
  if (free >= 0 && free - bytes < policy.min_free_bytes) {
    *reason = Reason::kFreeSpace;
    return absl::ResourceExhaustedError(absl::StrCat("of ", free, " free bytes ", bytes,
                                                     " are needed and ", policy.min_free_bytes,
                                                     " must stay free"));
  }
  return absl::OkStatus();
}

absl::Status StoreImpl::Evict(const std::string& key, absl::Time deadline) {
  RETURN_IF_ERROR(CheckKey(key));
  if (read_only) return absl::FailedPreconditionError("the store is open read-only");
  const std::string away = absl::StrCat(key, ".evicted.", RandomHex(8));
  {
    ASSIGN_OR_RETURN(const Descriptor lock, TakeLock(kDomainLock, deadline));
    absl::StatusOr<Descriptor> folder = OpenFolder(*ops, artifacts.get(), key);
    if (absl::IsNotFound(folder.status())) {
      return absl::NotFoundError(absl::StrCat("there is no artifact ", key));
    }
    RETURN_IF_ERROR(folder.status());
    if (Exists(pins.get(), key)) {
      return absl::FailedPreconditionError(absl::StrCat(key, " is pinned"));
    }
    // Kept until it has moved: who opens the folder before waits, and then sees that it has.
    if (!TryLock(folder->get(), LockKind::kExclusive)) {
      return absl::FailedPreconditionError(absl::StrCat(key, " is in use"));
    }
    if (ops->RenameAt(artifacts.get(), key.c_str(), staging.get(), away.c_str()) != 0) {
      return IoError(absl::StrCat("cannot move ", key, " away"));
    }
    if (ops->Fsync(artifacts.get()) != 0) return IoError("cannot flush the artifacts");
    ops->UnlinkAt(deny.get(), DenyName(key).c_str(), 0);
    ops->UnlinkAt(checks.get(), DenyName(key).c_str(), 0);
  }
  return RemoveTree(*ops, staging.get(), away);
}

absl::StatusOr<int> StoreImpl::EvictToFit(int64_t bytes, absl::Time deadline) {
  Reason reason;
  absl::Status room = CheckRoom(bytes, &reason);
  if (room.ok()) return 0;
  if (read_only) return room;
  // What nobody can use goes first.
  RETURN_IF_ERROR(ClearQuarantine(absl::ZeroDuration(), deadline).status());
  room = CheckRoom(bytes, &reason);

  std::vector<std::pair<absl::Time, std::string>> candidates;
  int64_t evictable_bytes = 0;
  if (!room.ok()) {
    ASSIGN_OR_RETURN(const std::vector<std::string> names, ListNames(artifacts.get()));
    for (const std::string& name : names) {
      struct stat info;
      if (!IsDigest(name) || Exists(pins.get(), name) ||
          fstatat(artifacts.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
        continue;
      }
      const absl::StatusOr<Descriptor> folder = OpenFolder(*ops, artifacts.get(), name);
      if (!folder.ok() || IsShared(folder->get())) continue;
      candidates.emplace_back(absl::TimeFromTimespec(info.st_mtim), name);
      evictable_bytes += BytesBelow(folder->get());
    }
    // Good artifacts do not go for one that would not fit even so.
    Reason ignored;
    if (!CheckRoom(bytes - evictable_bytes, &ignored).ok()) return room;
    std::sort(candidates.begin(), candidates.end());
  }
  int evicted = 0;
  for (const auto& [last_lease, key] : candidates) {
    if (room.ok()) break;
    const absl::Status status = Evict(key, deadline);
    if (absl::IsFailedPrecondition(status) || absl::IsNotFound(status)) continue;
    RETURN_IF_ERROR(status);
    spdlog::info("host weights: evicted the artifact {}, last leased {}", key,
                 absl::FormatTime(last_lease));
    ++evicted;
    room = CheckRoom(bytes, &reason);
  }
  if (!room.ok()) return room;
  return evicted;
}

absl::StatusOr<int> StoreImpl::ClearQuarantine(absl::Duration age, absl::Time deadline) {
  if (read_only) return absl::FailedPreconditionError("the store is open read-only");
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListNames(quarantine.get()));
  int cleared = 0;
  for (const std::string& name : names) {
    {
      ASSIGN_OR_RETURN(const Descriptor lock, TakeLock(kDomainLock, deadline));
      const absl::StatusOr<Descriptor> folder = OpenFolder(*ops, quarantine.get(), name);
      struct stat info;
      if (folder.ok() && fstat(folder->get(), &info) == 0) {
        // Since the move, which changed the folder.
        if (absl::Now() - absl::TimeFromTimespec(info.st_ctim) < age) continue;
        if (!TryLock(folder->get(), LockKind::kExclusive)) continue;
      }
      if (ops->RenameAt(quarantine.get(), name.c_str(), staging.get(), name.c_str()) != 0) {
        if (errno == ENOENT) continue;
        return IoError(absl::StrCat("cannot move ", name, " out of quarantine"));
      }
    }
    RETURN_IF_ERROR(RemoveTree(*ops, staging.get(), name));
    ++cleared;
  }
  return cleared;
}

absl::Status StoreImpl::Pin(const std::string& key, bool pinned) {
  RETURN_IF_ERROR(CheckKey(key));
  if (read_only) return absl::FailedPreconditionError("the store is open read-only");
  ASSIGN_OR_RETURN(const Descriptor lock, TakeLock(kDomainLock, absl::Now() + absl::Seconds(60)));
  if (pinned) {
    if (!Exists(artifacts.get(), key)) {
      return absl::NotFoundError(absl::StrCat("there is no artifact ", key));
    }
    if (Exists(pins.get(), key)) return absl::OkStatus();
    RETURN_IF_ERROR(WriteNew(*ops, pins.get(), key, "", 0600));
  } else if (ops->UnlinkAt(pins.get(), key.c_str(), 0) != 0) {
    if (errno == ENOENT) return absl::NotFoundError(absl::StrCat(key, " is not pinned"));
    return IoError(absl::StrCat("cannot unpin ", key));
  }
  if (ops->Fsync(pins.get()) != 0) return IoError("cannot flush the pins");
  return absl::OkStatus();
}

}  // namespace dlo::hwr
