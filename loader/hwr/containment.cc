#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "loader/hwr/folder_io.h"
#include "loader/hwr/store_impl.h"
#include "nlohmann/json.hpp"

namespace dlo::hwr {
namespace {

constexpr size_t kWhyBytesMax = 1000;

}  // namespace

std::string StoreImpl::Contain(const std::string& key, const struct stat& info, Reason reason,
                               absl::string_view why, absl::Time deadline) {
  const std::string marker =
      nlohmann::json{{"key", key},
                     {"reason", std::string(ReasonName(reason))},
                     {"why", std::string(why.substr(0, kWhyBytesMax))}}
          .dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  if (!IsStill(artifacts.get(), key, info)) return "moved away meanwhile";
  absl::Status marked = WriteNew(*ops, deny.get(), DenyName(key), marker, 0600);
  if (!marked.ok() && IsDenied(key)) marked = absl::OkStatus();  // half a marker is one
  if (marked.ok() && ops->Fsync(deny.get()) != 0) marked = IoError("cannot flush the marker");

  const absl::Status moved =
      Quarantine(key, info, reason, std::min(deadline, absl::Now() + kContainmentWait));
  if (moved.ok()) return "moved to quarantine";
  if (marked.ok()) return absl::StrCat("denied, and still in its place: ", moved.message());
  return absl::StrCat("it could neither be denied (", marked.message(), ") nor moved away (",
                      moved.message(), ")");
}

absl::Status StoreImpl::Quarantine(const std::string& key, const struct stat& info, Reason reason,
                                   absl::Time deadline) {
  ASSIGN_OR_RETURN(const Descriptor lock, TakeLock(kDomainLock, deadline));
  if (IsStill(artifacts.get(), key, info)) {
    const std::string name = absl::StrCat(key, ".", ReasonName(reason), ".", RandomHex(8));
    if (ops->RenameAt(artifacts.get(), key.c_str(), quarantine.get(), name.c_str()) != 0) {
      return IoError("cannot move it to quarantine");
    }
    if (ops->Fsync(quarantine.get()) != 0 || ops->Fsync(artifacts.get()) != 0) {
      return IoError("cannot flush the move to quarantine");
    }
  }
  // A marker of what was published meanwhile stays.
  if (!Exists(artifacts.get(), key)) {
    if (ops->UnlinkAt(deny.get(), DenyName(key).c_str(), 0) != 0 && errno != ENOENT) {
      return IoError("cannot remove the marker");
    }
    ops->UnlinkAt(checks.get(), DenyName(key).c_str(), 0);
    if (ops->Fsync(deny.get()) != 0) return IoError("cannot flush the markers");
  }
  return absl::OkStatus();
}

}  // namespace dlo::hwr
