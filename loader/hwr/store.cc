#include "loader/hwr/store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "loader/hwr/domain.h"
#include "loader/hwr/filesystem.h"
#include "loader/hwr/folder_io.h"
#include "loader/hwr/store_impl.h"
#include "spdlog/spdlog.h"

namespace dlo::hwr {
namespace {

namespace fs = std::filesystem;

// What Open makes; a root that holds anything else and no domain.json is no store.
constexpr char kDigestFolder[] = "source-digests";
constexpr const char* kFolders[] = {"locks", "artifacts", "staging", "quarantine",
                                    "deny",  "pins",      "checks",  kDigestFolder};

Failure OpenFailure(const absl::Status& status, Reason otherwise) {
  if (absl::IsDeadlineExceeded(status)) {
    return {Stage::kDomain, Reason::kDomainUnavailable, std::string(status.message())};
  }
  return FailureOf(status, Stage::kDomain, otherwise);
}

// The root without links; its last part need not be there.
absl::StatusOr<fs::path> RealRoot(const fs::path& root) {
  if (root.empty()) return absl::InvalidArgumentError("no root is given");
  std::error_code error;
  const fs::path absolute = fs::absolute(root, error).lexically_normal();
  const fs::path folder = absolute.has_filename() ? absolute : absolute.parent_path();
  fs::path real = fs::canonical(folder, error);
  if (!error) return real;
  real = fs::canonical(folder.parent_path(), error);
  if (error) {
    return absl::NotFoundError(
        absl::StrCat(folder.parent_path().native(), " is not there: make it first"));
  }
  return real / folder.filename();
}

// INVALID_ARGUMENT if the folder has content that is not a store's.
absl::Status CheckIsStoreOrEmpty(int root) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListNames(root));
  if (std::find(names.begin(), names.end(), kDomainName) != names.end()) return absl::OkStatus();
  for (const std::string& name : names) {
    const bool ours =
        std::find(std::begin(kFolders), std::end(kFolders), name) != std::end(kFolders);
    if (!ours && name != absl::StrCat(kDomainName, ".part")) {
      return absl::InvalidArgumentError(
          absl::StrCat("the folder holds ", JsonExcerpt(name), " and is no store of weights"));
    }
  }
  return absl::OkStatus();
}

// Of one who only looks: a folder that is not there is an empty one.
absl::StatusOr<Descriptor> LookAtFolder(FileOps& ops, int root, const char* name) {
  absl::StatusOr<Descriptor> folder = OpenFolder(ops, root, name);
  if (absl::IsNotFound(folder.status())) return Descriptor();
  return folder;
}

absl::StatusOr<std::string> ReadDocument(FileOps& ops, int root, const char* name) {
  return ReadOwn(ops, root, name, kDocumentBytesMax);
}

std::optional<Failure> ReadDocuments(FileOps& ops, int root, Domain* domain, StorePolicy* policy) {
  absl::StatusOr<std::string> bytes = ReadDocument(ops, root, kDomainName);
  if (!bytes.ok()) return OpenFailure(bytes.status(), Reason::kNotPrivate);
  absl::StatusOr<Domain> read = ParseDomain(*bytes);
  if (!read.ok()) {
    return Failure{Stage::kDomain, Reason::kPolicyMismatch, std::string(read.status().message())};
  }
  *domain = *std::move(read);
  bytes = ReadDocument(ops, root, kPolicyName);
  if (!bytes.ok()) return OpenFailure(bytes.status(), Reason::kNotPrivate);
  const absl::StatusOr<StorePolicy> limits = ParsePolicy(*bytes);
  if (!limits.ok()) {
    return Failure{Stage::kDomain, Reason::kPolicyMismatch, std::string(limits.status().message())};
  }
  *policy = *limits;
  return std::nullopt;
}

// The first process writes both; one that died between the two left the second to the next.
std::optional<Failure> WriteMissingDocuments(FileOps& ops, int root, const Domain& domain,
                                             const StorePolicy& policy) {
  for (const auto& [name, bytes] :
       {std::pair(kDomainName, WriteDomain(domain)), std::pair(kPolicyName, WritePolicy(policy))}) {
    if (Exists(root, name)) continue;
    const absl::Status status = Replace(ops, root, name, bytes);
    if (!status.ok()) return OpenFailure(status, Reason::kDomainUnavailable);
  }
  return std::nullopt;
}

std::string PolicyText(const StorePolicy& policy) {
  return absl::StrCat("at most ", policy.max_store_bytes, " bytes, an artifact ",
                      policy.max_artifact_bytes, ", ", policy.min_free_bytes,
                      " left free (0: none)");
}

bool Satisfies(const StorePolicy& policy, const StorePolicy& asked) {
  const auto is = [](int64_t limit, int64_t wanted) { return wanted == 0 || wanted == limit; };
  return is(policy.max_store_bytes, asked.max_store_bytes) &&
         is(policy.max_artifact_bytes, asked.max_artifact_bytes) &&
         is(policy.min_free_bytes, asked.min_free_bytes);
}

}  // namespace

Failure FailureOf(const absl::Status& status, Stage stage, Reason otherwise) {
  std::string message(status.message());
  if (absl::IsResourceExhausted(status)) {
    return {Stage::kCapacity, Reason::kNoSpace, std::move(message)};
  }
  if (absl::IsUnavailable(status) || absl::IsNotFound(status)) {
    return {stage, Reason::kIoError, std::move(message)};
  }
  if (absl::IsDeadlineExceeded(status)) return {stage, Reason::kLockTimeout, std::move(message)};
  return {stage, otherwise, std::move(message)};
}

absl::string_view EntryStateName(EntryState state) {
  switch (state) {
    case EntryState::kReady:
      return "ready";
    case EntryState::kDenied:
      return "denied";
    case EntryState::kIncomplete:
      return "incomplete";
    case EntryState::kQuarantined:
      return "quarantined";
    case EntryState::kStaging:
      return "staging";
  }
  return "";
}

Store::OpenResult StoreImpl::Open(const StoreOptions& options) {
  auto impl = std::make_unique<StoreImpl>();
  impl->ops = options.file_ops != nullptr ? options.file_ops : &SystemFileOps();
  impl->read_only = options.read_only;
  FileOps& ops = *impl->ops;

  absl::StatusOr<fs::path> real = RealRoot(options.root);
  if (!real.ok()) {
    return Failure{Stage::kConfiguration, Reason::kInvalidConfig,
                   absl::StrCat("host_weights.root: ", real.status().message())};
  }
  impl->root = *std::move(real);
  const auto at_root = [&](Failure failure) {
    failure.message = absl::StrCat(impl->root.native(), ": ", failure.message);
    return failure;
  };

  const absl::StatusOr<std::string> type = options.mount_table
                                               ? FilesystemOf(impl->root, options.mount_table())
                                               : FilesystemAt(impl->root);
  if (!type.ok() || ClassOf(*type) == StorageClass::kRefused) {
    return at_root({Stage::kDomain, Reason::kFilesystemRefused,
                    type.ok() ? absl::StrCat("a store cannot be on ", *type,
                                             ": locks, renames and mappings are trusted on local "
                                             "filesystems only")
                              : std::string(type.status().message())});
  }
  impl->filesystem = *type;
  const std::string storage(StorageClassName(ClassOf(*type)));

  if (!options.read_only && ops.MkdirAt(AT_FDCWD, impl->root.c_str(), 0700) != 0 &&
      errno != EEXIST) {
    return at_root(OpenFailure(IoError("cannot be made"), Reason::kNotPrivate));
  }
  absl::StatusOr<Descriptor> root_fd = OpenFolder(ops, AT_FDCWD, impl->root.native());
  if (!root_fd.ok()) {
    if (absl::IsNotFound(root_fd.status())) {
      return at_root({Stage::kDomain, Reason::kNotFound, "there is no store"});
    }
    return at_root(OpenFailure(root_fd.status(), Reason::kNotPrivate));
  }
  impl->root_fd = *std::move(root_fd);
  const int root = impl->root_fd.get();
  absl::Status status = CheckPrivate(root, "the folder");
  if (!status.ok()) return at_root(OpenFailure(status, Reason::kNotPrivate));
  status = CheckIsStoreOrEmpty(root);
  if (!status.ok()) return at_root(OpenFailure(status, Reason::kInvalidConfig));
  if (options.read_only && !Exists(root, kDomainName)) {
    return at_root({Stage::kDomain, Reason::kNotFound, "there is no store"});
  }

  for (const auto& [name, descriptor] : {std::pair("locks", &impl->locks),
                                         {"artifacts", &impl->artifacts},
                                         {"staging", &impl->staging},
                                         {"quarantine", &impl->quarantine},
                                         {"deny", &impl->deny},
                                         {"pins", &impl->pins},
                                         {"checks", &impl->checks}}) {
    absl::StatusOr<Descriptor> folder =
        options.read_only ? LookAtFolder(ops, root, name) : MakeFolder(ops, root, name);
    status = folder.status();
    if (status.ok() && *folder) status = CheckPrivate(folder->get(), name);
    if (!status.ok()) return at_root(OpenFailure(status, Reason::kNotPrivate));
    *descriptor = *std::move(folder);
  }

  Domain domain;
  if (!options.read_only) {
    const absl::StatusOr<Descriptor> lock = impl->TakeLock(kDomainLock, absl::Now() + options.wait);
    if (!lock.ok()) return at_root(OpenFailure(lock.status(), Reason::kNotPrivate));
    std::optional<Failure> failure = WriteMissingDocuments(
        ops, root, {.id = RandomHex(16), .storage_class = storage, .filesystem = *type},
        options.policy);
    if (!failure) failure = ReadDocuments(ops, root, &domain, &impl->policy);
    if (failure) return at_root(*std::move(failure));
  } else if (std::optional<Failure> failure = ReadDocuments(ops, root, &domain, &impl->policy)) {
    return at_root(*std::move(failure));
  }
  if (domain.storage_class != storage || domain.filesystem != *type) {
    return at_root({Stage::kDomain, Reason::kStorageClassMismatch,
                    absl::StrCat("made on ", domain.filesystem, ", and now on ", *type)});
  }
  if (!Satisfies(impl->policy, options.policy)) {
    return at_root({Stage::kDomain, Reason::kPolicyMismatch,
                    absl::StrCat("the store was made with other limits: ", PolicyText(impl->policy),
                                 "; asked for: ", PolicyText(options.policy),
                                 ". Ask for its own or for none, or use another root")});
  }
  impl->domain_id = domain.id;
  return std::unique_ptr<Store>(new Store(std::move(impl)));
}

absl::StatusOr<Descriptor> StoreImpl::TakeLock(const char* name, absl::Time deadline) const {
  Descriptor file(ops->OpenAt(locks.get(), name, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK, 0600));
  if (!file) return IoError(absl::StrCat("cannot open ", name));
  const absl::Status status = Lock(file.get(), LockKind::kExclusive, deadline);
  if (!status.ok()) return absl::Status(status.code(), absl::StrCat(name, ": ", status.message()));
  return file;
}

absl::StatusOr<StoreInventory> StoreImpl::Inventory() const {
  StoreInventory inventory = {.domain_id = domain_id,
                              .filesystem = filesystem,
                              .policy = policy,
                              .bytes = BytesBelow(root_fd.get()),
                              .free_bytes = ops->FreeBytes(root_fd.get()),
                              .entries = {}};
  for (const auto& [folder, state] : {std::pair(&artifacts, EntryState::kReady),
                                      {&quarantine, EntryState::kQuarantined},
                                      {&staging, EntryState::kStaging}}) {
    if (!*folder) continue;
    ASSIGN_OR_RETURN(const std::vector<std::string> names, ListNames(folder->get()));
    for (const std::string& name : names) {
      StoreEntry entry = {.state = state, .name = name, .key = name.substr(0, name.find('.'))};
      absl::StatusOr<Descriptor> opened = OpenFolder(*ops, folder->get(), name);
      struct stat info{};
      if (!opened.ok() || fstat(opened->get(), &info) != 0) {
        if (absl::IsNotFound(opened.status())) continue;  // gone meanwhile
        entry.problem = std::string(opened.status().message());
        if (state == EntryState::kReady) entry.state = EntryState::kIncomplete;
        inventory.entries.push_back(std::move(entry));
        continue;
      }
      entry.bytes = BytesBelow(opened->get());
      entry.last_lease = absl::TimeFromTimespec(info.st_mtim);
      entry.leased = IsShared(opened->get());
      absl::StatusOr<std::string> bytes = [&]() -> absl::StatusOr<std::string> {
        struct stat file_info;
        ASSIGN_OR_RETURN(
            const Descriptor file,
            OpenPublished(*ops, opened->get(), std::string(kManifestName), &file_info));
        return ReadAll(*ops, file.get(), kManifestBytesMax);
      }();
      const absl::StatusOr<Manifest> manifest =
          bytes.ok() ? ParseManifest(*bytes) : absl::StatusOr<Manifest>(bytes.status());
      if (manifest.ok()) {
        entry.identity = manifest->identity.document;
      } else {
        entry.problem = std::string(manifest.status().message());
      }
      if (state == EntryState::kReady) {
        entry.pinned = pins && Exists(pins.get(), name);
        if (!manifest.ok() || !Exists(opened->get(), std::string(kReadyName))) {
          entry.state = EntryState::kIncomplete;
        }
        if (deny && IsDenied(name)) entry.state = EntryState::kDenied;
      }
      inventory.entries.push_back(std::move(entry));
    }
  }
  return inventory;
}

Store::Store(std::unique_ptr<StoreImpl> impl) : impl_(std::move(impl)) {}
Store::~Store() = default;

Store::OpenResult Store::Open(const StoreOptions& options) { return StoreImpl::Open(options); }

const fs::path& Store::root() const { return impl_->root; }
const std::string& Store::domain_id() const { return impl_->domain_id; }
const StorePolicy& Store::policy() const { return impl_->policy; }

DigestCache Store::digests(absl::Time deadline) const {
  return DigestCache(root() / kDigestFolder, {.read_only = impl_->read_only, .deadline = deadline});
}

LookupResult Store::Lookup(const Identity& identity, const LookupOptions& options) {
  return impl_->Lookup(identity.key, &identity.document, options, /*remember=*/true);
}

LookupResult Store::Verify(const std::string& key, const LookupOptions& options) {
  LookupOptions full = options;
  full.validation = Validation::kFull;
  return impl_->Lookup(key, nullptr, full, /*remember=*/false);
}

PublicationRecord Store::Publish(const Identity& identity, const ArtifactLayout& layout,
                                 PartProducer& producer, const PublishOptions& options) {
  return impl_->Publish(identity, layout, producer, options);
}

absl::StatusOr<StoreInventory> Store::Inventory() const { return impl_->Inventory(); }

absl::Status Store::Evict(const std::string& key, absl::Time deadline) {
  return impl_->Evict(key, deadline);
}

absl::StatusOr<int> Store::EvictToFit(int64_t bytes, absl::Time deadline) {
  return impl_->EvictToFit(bytes, deadline);
}

absl::StatusOr<int> Store::ClearQuarantine(absl::Duration age, absl::Time deadline) {
  return impl_->ClearQuarantine(age, deadline);
}

absl::Status Store::Pin(const std::string& key) { return impl_->Pin(key, true); }
absl::Status Store::Unpin(const std::string& key) { return impl_->Pin(key, false); }

}  // namespace dlo::hwr
