#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "loader/chunk_threads.h"
#include "loader/hwr/folder_io.h"
#include "loader/hwr/store_impl.h"
#include "spdlog/spdlog.h"

namespace dlo::hwr {
namespace {

absl::string_view AsText(absl::Span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Zeroes what no tensor of the part covers.
void ZeroGaps(const ArtifactPart& part, absl::Span<std::byte> bytes) {
  int64_t end = 0;
  for (const ArtifactTensor& tensor : part.tensors) {
    std::memset(bytes.data() + end, 0, tensor.offset - end);
    end = tensor.offset + tensor.bytes;
  }
  std::memset(bytes.data() + end, 0, static_cast<int64_t>(bytes.size()) - end);
}

}  // namespace

// One publication, from the wait for the builder's lock to the look at what was built.
class PublishJob {
 public:
  PublishJob(StoreImpl& store, const Identity& identity, const ArtifactLayout& layout,
             PartProducer& producer, const PublishOptions& options)
      : store_(store),
        ops_(*store.ops),
        identity_(identity),
        layout_(layout),
        producer_(producer),
        options_(options) {}

  PublicationRecord Run() {
    const absl::Time start = absl::Now();
    record_.key = identity_.key;
    if (std::optional<Failure> failure = Build()) {
      const bool busy = failure->reason == Reason::kActiveBuild;
      record_.outcome = busy ? PublicationOutcome::kBusy : PublicationOutcome::kFailed;
      record_.failure = *std::move(failure);
      spdlog::log(busy ? spdlog::level::info : spdlog::level::warn,
                  "host weights: the artifact {} was not published: {}", identity_.key,
                  record_.failure.Text());
    }
    record_.time = absl::Now() - start;
    if (record_.outcome == PublicationOutcome::kPublished) {
      const double seconds = absl::ToDoubleSeconds(record_.time - record_.waited);
      spdlog::info("{}", absl::StrFormat("host weights: published the artifact %s: %.1f MB in %.2f "
                                         "s, %d others evicted",
                                         identity_.key, static_cast<double>(record_.bytes) / 1e6,
                                         seconds, record_.evicted));
    }
    return std::move(record_);
  }

 private:
  std::optional<Failure> Build() {
    if (std::optional<Failure> failure = CheckRequest()) return failure;
    if (std::optional<Failure> failure = Look(PublicationOutcome::kAlreadyPresent)) return failure;
    if (record_.outcome == PublicationOutcome::kAlreadyPresent) return std::nullopt;

    const absl::Time wait_start = absl::Now();
    const absl::StatusOr<Descriptor> build =
        store_.TakeLock(kBuildLock, std::min(options_.deadline, options_.builder_deadline));
    record_.waited = absl::Now() - wait_start;
    if (absl::IsDeadlineExceeded(build.status())) {
      return Failure{Stage::kProduction, Reason::kActiveBuild, "another process is building"};
    }
    if (!build.ok()) return FailureOf(build.status(), Stage::kProduction, Reason::kNotPrivate);
    if (std::optional<Failure> failure = Look(PublicationOutcome::kJoined)) return failure;
    if (record_.outcome == PublicationOutcome::kJoined) return std::nullopt;
    if (Exists(store_.artifacts.get(), identity_.key)) {
      return Failure{Stage::kLifecycle, Reason::kUncertain,
                     "a corrupt artifact is in the way and cannot be moved"};
    }

    ClearStaging();
    if (std::optional<Failure> failure = MakeRoom()) return failure;
    if (std::optional<Failure> failure = CheckSources()) return failure;
    const std::string name = absl::StrCat(identity_.key, ".", RandomHex(8));
    // After Place it is not there any more.
    const absl::Cleanup remove = [&] {
      RemoveTree(ops_, store_.staging.get(), name).IgnoreError();
    };
    if (std::optional<Failure> failure = WriteStaging(name)) return failure;
    if (std::optional<Failure> failure = Place(name)) return failure;
    if (record_.outcome == PublicationOutcome::kJoined) return std::nullopt;

    // It is trusted no more than anybody else's.
    const LookupResult built =
        store_.Lookup(identity_.key, &identity_.document,
                      {.deadline = AfterBuild(), .threads = options_.threads}, true);
    if (built.status != LookupStatus::kHit) return built.failure;
    record_.outcome = PublicationOutcome::kPublished;
    return std::nullopt;
  }

  // The deadline is of waiting for others, not of the production: what has been built is not thrown
  // away for a lock that somebody has for a moment.
  absl::Time AfterBuild() const {
    return std::max(options_.deadline, absl::Now() + absl::Seconds(60));
  }

  std::optional<Failure> CheckRequest() {
    if (store_.read_only) {
      return Failure{Stage::kConfiguration, Reason::kInvalidConfig, "the store is open read-only"};
    }
    absl::Status status = CheckLayout(layout_);
    if (status.ok() &&
        (!ParseIdentity(identity_.document).ok() || Sha256Of(identity_.document) != identity_.key ||
         !absl::StrContains(identity_.document, LayoutDigest(layout_)))) {
      status = absl::InvalidArgumentError("the layout is not the identity's");
    }
    if (status.ok()) return std::nullopt;
    return Failure{Stage::kConfiguration, Reason::kInvalidConfig, std::string(status.message())};
  }

  // Sets `outcome` on a hit. Misses and corrupt artifacts, which have been moved away, are no
  // failures.
  std::optional<Failure> Look(PublicationOutcome outcome) {
    const LookupResult found =
        store_.Lookup(identity_.key, &identity_.document, {.deadline = options_.deadline}, true);
    if (found.status == LookupStatus::kHit) record_.outcome = outcome;
    if (found.status == LookupStatus::kTimeout || found.status == LookupStatus::kFailed) {
      return found.failure;
    }
    return std::nullopt;
  }

  // Whoever left something there is dead: there is one builder, and it is this process. (Or it is
  // an eviction, which does not mind.)
  void ClearStaging() {
    const absl::StatusOr<std::vector<std::string>> names = ListNames(store_.staging.get());
    if (!names.ok()) return;
    for (const std::string& name : *names) {
      RemoveTree(ops_, store_.staging.get(), name).IgnoreError();
    }
  }

  std::optional<Failure> MakeRoom() {
    manifest_.identity = identity_;
    manifest_.layout = layout_;
    for (const ArtifactComponent& component : layout_) {
      manifest_.part_digests.emplace_back(component.parts.size(), std::string(64, '0'));
    }
    const std::string manifest = WriteManifest(manifest_);
    const int64_t bytes = PayloadBytes(layout_) + static_cast<int64_t>(manifest.size()) +
                          static_cast<int64_t>(WriteReady(manifest, manifest_).size());
    if (store_.policy.max_artifact_bytes > 0 && bytes > store_.policy.max_artifact_bytes) {
      return Failure{Stage::kCapacity, Reason::kArtifactTooLarge,
                     absl::StrCat("it has ", bytes, " bytes, and at most ",
                                  store_.policy.max_artifact_bytes, " are allowed")};
    }
    const absl::StatusOr<int> evicted = store_.EvictToFit(bytes, options_.deadline);
    if (evicted.ok()) {
      record_.evicted = *evicted;
      return std::nullopt;
    }
    Reason reason = Reason::kIoError;
    if (store_.CheckRoom(bytes, &reason).ok()) return std::nullopt;
    return Failure{Stage::kCapacity, reason, std::string(evicted.status().message())};
  }

  std::optional<Failure> CheckSources() {
    const absl::Status status = producer_.CheckSources();
    if (status.ok()) return std::nullopt;
    return Failure{Stage::kProduction, Reason::kSourceChanged, std::string(status.message())};
  }

  static Failure WriteFailure(const absl::Status& status) {
    return FailureOf(status, Stage::kProduction, Reason::kIoError);
  }

  // Everything below staging/NAME, flushed, the marker last.
  std::optional<Failure> WriteStaging(const std::string& name) {
    const absl::StatusOr<Descriptor> folder = MakeFolder(ops_, store_.staging.get(), name);
    if (!folder.ok()) return WriteFailure(folder.status());
    for (size_t c = 0; c < layout_.size(); ++c) {
      if (std::optional<Failure> failure = WritePayload(folder->get(), static_cast<int>(c))) {
        return failure;
      }
    }
    if (std::optional<Failure> failure = CheckSources()) return failure;
    manifest_bytes_ = WriteManifest(manifest_);
    absl::Status status =
        WriteNew(ops_, folder->get(), std::string(kManifestName), manifest_bytes_, 0444);
    if (status.ok()) {
      status = WriteNew(ops_, folder->get(), std::string(kReadyName),
                        WriteReady(manifest_bytes_, manifest_), 0444);
    }
    if (status.ok() && ops_.Fsync(folder->get()) != 0) status = IoError("cannot flush the folder");
    if (!status.ok()) return WriteFailure(status);
    return std::nullopt;
  }

  std::optional<Failure> WritePayload(int folder, int component) {
    const ArtifactComponent& layout = layout_[component];
    const std::string name = PayloadName(layout);
    const Descriptor file(
        ops_.OpenAt(folder, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
    if (!file) return WriteFailure(IoError(absl::StrCat("cannot create ", name)));
    if (ops_.Allocate(file.get(), PayloadBytes(layout)) != 0) {
      return WriteFailure(IoError(absl::StrCat("cannot reserve the space of ", name)));
    }
    int64_t buffer_bytes = 0;
    for (const ArtifactPart& part : layout.parts) {
      buffer_bytes = std::max(buffer_bytes, PartExtent(part.bytes));
    }
    const std::unique_ptr<std::byte[]> buffer(new (std::nothrow) std::byte[buffer_bytes]);
    if (buffer == nullptr) {
      return WriteFailure(absl::ResourceExhaustedError(
          absl::StrCat("no memory for a part of ", buffer_bytes, " bytes")));
    }
    int64_t offset = 0;
    for (size_t p = 0; p < layout.parts.size(); ++p) {
      const ArtifactPart& part = layout.parts[p];
      const absl::Span<std::byte> extent(buffer.get(), PartExtent(part.bytes));
      const absl::Status produced =
          producer_.Produce(component, static_cast<int>(p), extent.subspan(0, part.bytes));
      if (!produced.ok()) {
        return Failure{Stage::kProduction, Reason::kProducerFailed,
                       std::string(produced.message())};
      }
      ZeroGaps(part, extent);
      const auto hash_and_write = [&](int64_t write) {
        if (write != 0) return WriteAll(ops_, file.get(), AsText(extent));
        manifest_.part_digests[component][p] = Sha256Of(AsText(extent.subspan(0, part.bytes)));
        return absl::OkStatus();
      };
      const absl::Status written =
          RunChunks(2, /*threads=*/2, "hashing host weights", hash_and_write).status();
      if (!written.ok()) return WriteFailure(written);
      // So that the flush at the end finds little to do.
      sync_file_range(file.get(), offset, static_cast<off_t>(extent.size()), SYNC_FILE_RANGE_WRITE);
      offset += static_cast<int64_t>(extent.size());
      record_.bytes += static_cast<int64_t>(extent.size());
    }
    if (ops_.Chmod(file.get(), 0444) != 0) {
      return WriteFailure(IoError(absl::StrCat("cannot chmod ", name)));
    }
    if (ops_.Fsync(file.get()) != 0) {
      return WriteFailure(IoError(absl::StrCat("cannot flush ", name)));
    }
    return std::nullopt;
  }

  // Gives the staged folder its name. What the last flush returns decides.
  std::optional<Failure> Place(const std::string& name) {
    const absl::StatusOr<Descriptor> domain = store_.TakeLock(kDomainLock, AfterBuild());
    if (!domain.ok()) return WriteFailure(domain.status());
    const std::string& key = identity_.key;
    if (Exists(store_.artifacts.get(), key)) return Yield(name);
    // A marker without an artifact is left over.
    if (ops_.UnlinkAt(store_.deny.get(), StoreImpl::DenyName(key).c_str(), 0) != 0) {
      if (errno != ENOENT) return WriteFailure(IoError("cannot remove an old marker"));
    } else if (ops_.Fsync(store_.deny.get()) != 0) {
      return WriteFailure(IoError("cannot flush the markers"));
    }
    if (ops_.RenameAt(store_.staging.get(), name.c_str(), store_.artifacts.get(), key.c_str()) !=
        0) {
      return WriteFailure(IoError("cannot put the artifact in its place"));
    }
    if (ops_.Fsync(store_.staging.get()) == 0 && ops_.Fsync(store_.artifacts.get()) == 0) {
      return std::nullopt;
    }
    Failure failure = WriteFailure(IoError("cannot flush the artifact's name"));
    const std::string away = absl::StrCat(key, ".uncommitted.", RandomHex(8));
    if (ops_.RenameAt(store_.artifacts.get(), key.c_str(), store_.quarantine.get(), away.c_str()) !=
        0) {
      failure.reason = Reason::kUncertain;
      absl::StrAppend(&failure.message, "; nor can it be moved away: ", strerror(errno));
    }
    return failure;
  }

  // Somebody has put an artifact there although this process has the builder's lock: theirs stays.
  std::optional<Failure> Yield(const std::string& name) {
    const absl::StatusOr<std::string> theirs = [&]() -> absl::StatusOr<std::string> {
      struct stat info;
      ASSIGN_OR_RETURN(const Descriptor folder,
                       OpenFolder(ops_, store_.artifacts.get(), identity_.key));
      ASSIGN_OR_RETURN(const Descriptor file,
                       OpenPublished(ops_, folder.get(), std::string(kManifestName), &info));
      return ReadAll(ops_, file.get(), kManifestBytesMax);
    }();
    if (!theirs.ok() || !ParseManifest(*theirs).ok()) {
      return Failure{Stage::kLifecycle, Reason::kUncertain,
                     "an artifact that cannot be read has appeared in its place"};
    }
    if (*theirs == manifest_bytes_) {
      record_.outcome = PublicationOutcome::kJoined;
      return std::nullopt;
    }
    const std::string away =
        absl::StrCat(identity_.key, ".", ReasonName(Reason::kIdentityCollision), ".", RandomHex(8));
    ops_.RenameAt(store_.staging.get(), name.c_str(), store_.quarantine.get(), away.c_str());
    return Failure{Stage::kValidation, Reason::kIdentityCollision,
                   absl::StrCat("an artifact of the same identity and other bytes was published "
                                "meanwhile; this one is in quarantine as ",
                                away)};
  }

  StoreImpl& store_;
  FileOps& ops_;
  const Identity& identity_;
  const ArtifactLayout& layout_;
  PartProducer& producer_;
  const PublishOptions& options_;
  PublicationRecord record_;
  Manifest manifest_;
  std::string manifest_bytes_;
};

PublicationRecord StoreImpl::Publish(const Identity& identity, const ArtifactLayout& layout,
                                     PartProducer& producer, const PublishOptions& options) {
  return PublishJob(*this, identity, layout, producer, options).Run();
}

}  // namespace dlo::hwr
