// A folder of artifacts on a filesystem of this machine, shared by processes of one user.
//
//   Store::OpenResult opened = Store::Open({.root = "/var/lib/dlo/weights"});
//   Store& store = *std::get<std::unique_ptr<Store>>(opened);
//   LookupResult found = store.Lookup(identity, {.validation = Validation::kMetadata});
//   if (!found.lease) PublicationRecord record = store.Publish(identity, layout, producer, {});
//
// No lookup ever sees part of an artifact, whatever process dies when: payloads, manifest and
// marker are flushed in a staging folder, which then gets its name by one rename. One process
// builds at a time; the others wait and find what it built. Artifacts are never changed. One that
// turns out corrupt is denied and moved to quarantine, with its pages intact for who has them
// mapped.
//
// Locks are advisory, of whole files (flock), and end with their process: locks/domain.lock for
// moves, locks/build.lock for the one builder, and each artifact's folder, shared by its leases.
//
// Thread-safe, and so are processes against each other. Deadlines bound the waiting for locks, not
// the work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "loader/hwr/digest_cache.h"
#include "loader/hwr/identity.h"
#include "loader/hwr/layout.h"
#include "loader/hwr/lease.h"
#include "loader/hwr/outcome.h"

namespace dlo::hwr {

class FileOps;
class StoreImpl;

// Limits of a store, in bytes; 0: none. Written down by who makes the store.
struct StorePolicy {
  int64_t max_store_bytes = 0;  // of every file below the root
  int64_t max_artifact_bytes = 0;
  int64_t min_free_bytes = 0;  // of the filesystem, for this user, after a build

  bool operator==(const StorePolicy&) const = default;
};

struct StoreOptions {
  std::filesystem::path root;  // created with mode 0700; its parent must be there
  // What is asked for must be what the store was made with; 0: whatever that is.
  StorePolicy policy;
  // Only look: nothing is created or changed, no lock is waited for. Reason::kNotFound without a
  // store.
  bool read_only = false;
  absl::Duration wait = absl::Seconds(600);  // for the lock of a store that is being made

  // For tests; defaults: the operating system, /proc/self/mountinfo.
  FileOps* file_ops = nullptr;
  std::function<std::string()> mount_table;
};

struct LookupOptions {
  Validation validation = Validation::kMetadata;
  absl::Time deadline = absl::InfiniteFuture();
  int threads = 0;  // that check sums; 0: as many as there are cores
};

enum class LookupStatus : uint8_t {
  kHit,
  kMiss,
  kInvalid,  // there is one, and it is denied or corrupt
  kTimeout,
  kFailed  // it could not be told
};

struct LookupResult {
  LookupStatus status = LookupStatus::kMiss;
  std::optional<Lease> lease;  // exactly if kHit
  Failure failure;             // else; kMiss: Reason::kMiss
  absl::Duration map_time;     // of a hit: of opening and mapping its payloads
};

// Fills an artifact part by part. Called from one thread, for the parts of the components in order.
class PartProducer {
 public:
  virtual ~PartProducer() = default;
  // Writes the tensors of the part to `to`, whose size is the part's. What lies between them is
  // zeroed by the caller afterwards.
  virtual absl::Status Produce(int component, int part, absl::Span<std::byte> to) = 0;
  // Asked before the first part and after the last: not OK, nothing is published.
  virtual absl::Status CheckSources() { return absl::OkStatus(); }
};

struct PublishOptions {
  absl::Time deadline = absl::InfiniteFuture();          // for the locks
  absl::Time builder_deadline = absl::InfiniteFuture();  // for another process that builds
  int threads = 0;                                       // that check sums in the final look
};

// Of inspection.
enum class EntryState : uint8_t { kReady, kDenied, kIncomplete, kQuarantined, kStaging };
absl::string_view EntryStateName(EntryState state);

struct StoreEntry {
  EntryState state = EntryState::kReady;
  std::string name;  // of its folder: the key, with more behind it unless kReady, kDenied
  std::string key;
  int64_t bytes = 0;
  absl::Time last_lease;  // when the newest began or ended; of a new one, its publication
  bool pinned = false;
  bool leased = false;   // at this moment
  std::string identity;  // document; empty: unreadable
  std::string problem;   // of metadata that does not pass
};

struct StoreInventory {
  std::string domain_id;
  std::string filesystem;
  StorePolicy policy;
  int64_t bytes = 0;       // of every file below the root
  int64_t free_bytes = 0;  // of the filesystem, for this user
  std::vector<StoreEntry> entries;
};

class Store {
 public:
  using OpenResult = std::variant<std::unique_ptr<Store>, Failure>;
  static OpenResult Open(const StoreOptions& options);

  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  ~Store();

  const std::filesystem::path& root() const;
  const std::string& domain_id() const;
  const StorePolicy& policy() const;
  // Of sources, in a folder of the store, which counts against the limits; read-only as the store.
  // `deadline`: of waiting for others that hash.
  DigestCache digests(absl::Time deadline) const;

  LookupResult Lookup(const Identity& identity, const LookupOptions& options);

  PublicationRecord Publish(const Identity& identity, const ArtifactLayout& layout,
                            PartProducer& producer, const PublishOptions& options);

  // Every folder of the store; reads, changes and waits for nothing.
  absl::StatusOr<StoreInventory> Inventory() const;

  // Looks an artifact up by its key, with full validation whatever was remembered.
  LookupResult Verify(const std::string& key, const LookupOptions& options);

  // Removes an artifact. FAILED_PRECONDITION if it is pinned or leased; NOT_FOUND.
  absl::Status Evict(const std::string& key, absl::Time deadline);
  // Removes the least recently leased ones until `bytes` more fit; returns how many went. Pinned
  // and leased ones stay. RESOURCE_EXHAUSTED if that is not enough.
  absl::StatusOr<int> EvictToFit(int64_t bytes, absl::Time deadline);
  // Removes what is in quarantine for longer than `age` and mapped by nobody; returns how many.
  absl::StatusOr<int> ClearQuarantine(absl::Duration age, absl::Time deadline);
  // A pinned artifact is never evicted. NOT_FOUND.
  absl::Status Pin(const std::string& key);
  absl::Status Unpin(const std::string& key);

 private:
  friend class StoreImpl;
  explicit Store(std::unique_ptr<StoreImpl> impl);
  std::unique_ptr<StoreImpl> impl_;
};

}  // namespace dlo::hwr
