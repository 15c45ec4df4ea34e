// What the parts of Store share. Internal to loader/hwr/.
//
// Order of locks: build, then domain, then an artifact's folder. Whoever waits for one holds none
// that comes after it, but for containment, which tries for the domain with the artifact shared and
// gives up soon.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "loader/hwr/descriptor.h"
#include "loader/hwr/file_ops.h"
#include "loader/hwr/folder_io.h"
#include "loader/hwr/store.h"

namespace dlo::hwr {

inline constexpr char kDomainLock[] = "domain.lock";
inline constexpr char kBuildLock[] = "build.lock";

// How long a look-up that found an artifact corrupt waits for the domain, to move it away. Until
// then the marker that denies it does.
inline constexpr absl::Duration kContainmentWait = absl::Seconds(5);

class StoreImpl {
 public:
  // --- store.cc
  static Store::OpenResult Open(const StoreOptions& options);
  absl::StatusOr<StoreInventory> Inventory() const;

  // The domain's or the build's lock: held as long as what is returned.
  absl::StatusOr<Descriptor> TakeLock(const char* name, absl::Time deadline) const;

  // --- lookup.cc
  // `key`: of the artifact; `document`: what its identity must be, null: whatever has the key.
  // `remember`: a full check that was passed before counts.
  LookupResult Lookup(const std::string& key, const std::string* document,
                      const LookupOptions& options, bool remember);

  // --- containment.cc
  // Denies an artifact, flushed to disk, and moves it to quarantine; says what of that was done.
  // `info`: of its folder.
  std::string Contain(const std::string& key, const struct stat& info, Reason reason,
                      absl::string_view why, absl::Time deadline);
  // Moves what is there under the key away, and the marker with it. OK if nothing is there.
  absl::Status Quarantine(const std::string& key, const struct stat& info, Reason reason,
                          absl::Time deadline);
  bool IsDenied(const std::string& key) const { return Exists(deny.get(), DenyName(key)); }
  static std::string DenyName(const std::string& key) { return key + ".json"; }

  // --- publish.cc
  PublicationRecord Publish(const Identity& identity, const ArtifactLayout& layout,
                            PartProducer& producer, const PublishOptions& options);

  // --- eviction.cc
  absl::Status Evict(const std::string& key, absl::Time deadline);
  absl::StatusOr<int> EvictToFit(int64_t bytes, absl::Time deadline);
  absl::StatusOr<int> ClearQuarantine(absl::Duration age, absl::Time deadline);
  absl::Status Pin(const std::string& key, bool pinned);
  // What is over a limit if `bytes` more are stored; OK if nothing is.
  absl::Status CheckRoom(int64_t bytes, Reason* reason) const;

  FileOps* ops = nullptr;
  std::filesystem::path root;
  StorePolicy policy;
  std::string domain_id;
  std::string filesystem;
  bool read_only = false;

  Descriptor root_fd;
  Descriptor locks;
  Descriptor artifacts;
  Descriptor staging;
  Descriptor quarantine;
  Descriptor deny;
  Descriptor pins;
  Descriptor checks;
};

// Of a failed operation on files, by its status code as folder_io.h gives it; `otherwise` for a
// state that is wrong.
Failure FailureOf(const absl::Status& status, Stage stage, Reason otherwise);

}  // namespace dlo::hwr
