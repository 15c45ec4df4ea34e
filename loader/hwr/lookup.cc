#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "loader/chunk_threads.h"
#include "loader/hwr/folder_io.h"
#include "loader/hwr/store_impl.h"
#include "nlohmann/json.hpp"
#include "spdlog/spdlog.h"

namespace dlo::hwr {
namespace {

constexpr size_t kReadBytes = size_t{1} << 20;
constexpr int kThreadsMax = 64;
// How often an artifact may be moved away and replaced while it is being opened.
constexpr int kReplacementsMax = 100;

struct Payload {
  Descriptor file;
  struct stat info{};
};

std::string BootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

int64_t ChangeTimeNs(const struct stat& info) {
  return info.st_ctim.tv_sec * 1'000'000'000 + info.st_ctim.tv_nsec;
}

// Reads the bytes of a part and what follows it up to the next one, which must be zero.
absl::Status CheckPart(FileOps& ops, int fd, int64_t offset, int64_t bytes, int64_t extent,
                       const std::string& digest, std::vector<char>* buffer) {
  Sha256 hash;
  for (int64_t done = 0; done < extent;) {
    const size_t want = std::min<int64_t>(static_cast<int64_t>(buffer->size()), extent - done);
    const ssize_t got = ops.ReadAt(fd, buffer->data(), want, offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return IoError("cannot read");
    if (got == 0) return absl::DataLossError("the file ends early");
    const int64_t data = std::clamp<int64_t>(bytes - done, 0, got);
    hash.Update(absl::string_view(buffer->data(), data));
    if (std::any_of(buffer->begin() + data, buffer->begin() + got, [](char c) { return c != 0; })) {
      return absl::DataLossError("there is something behind its end");
    }
    done += got;
  }
  if (hash.Finish() != digest) return absl::DataLossError("its bytes have another digest");
  return absl::OkStatus();
}

}  // namespace

// One look-up, from the lock to the lease.
class LookupJob {
 public:
  LookupJob(StoreImpl& store, const std::string& key, const std::string* document,
            const LookupOptions& options, bool remember)
      : store_(store), key_(key), document_(document), options_(options), remember_(remember) {}

  LookupResult Run() {
    if (!IsDigest(key_)) {
      return Failed(LookupStatus::kFailed, {Stage::kConfiguration, Reason::kInvalidConfig,
                                            "a key has 64 hexadecimal digits"});
    }
    if (!store_.artifacts) return Miss();
    for (int i = 0; i < kReplacementsMax; ++i) {
      if (std::optional<LookupResult> result = TakeShared()) return *std::move(result);
      if (!IsStill(store_.artifacts.get(), key_, info_)) continue;
      if (store_.deny && store_.IsDenied(key_)) {
        return Denied("it was found corrupt before");
      }
      std::optional<LookupResult> result = Open();
      if (result) return *std::move(result);
      // A weaker look must not win over a stronger one that denied the artifact meanwhile.
      if (store_.deny && store_.IsDenied(key_)) return Denied("it was found corrupt meanwhile");
      if (!IsStill(store_.artifacts.get(), key_, info_)) continue;
      if (!store_.read_only) store_.ops->Touch(folder_.get());
      return Hit();
    }
    return Failed(LookupStatus::kFailed,
                  {Stage::kLookup, Reason::kIoError, "the artifact is replaced all the time"});
  }

 private:
  LookupResult Failed(LookupStatus status, Failure failure) {
    LookupResult result;
    result.status = status;
    result.failure = std::move(failure);
    return result;
  }
  LookupResult Miss() {
    return Failed(LookupStatus::kMiss,
                  {Stage::kLookup, Reason::kMiss, "there is no such artifact"});
  }

  // Something is wrong with the artifact itself: nobody may use it any more.
  LookupResult Invalid(Reason reason, absl::string_view why) {
    std::string message(why);
    if (!store_.read_only) {
      absl::StrAppend(&message, "; ", store_.Contain(key_, info_, reason, why, options_.deadline));
    }
    spdlog::error("host weights: the artifact {} is not used: {}", key_, message);
    return Failed(LookupStatus::kInvalid, {Stage::kValidation, reason, std::move(message)});
  }

  LookupResult Denied(absl::string_view why) {
    std::string message(why);
    if (!store_.read_only) {
      const absl::Status moved =
          store_.Quarantine(key_, info_, Reason::kDenied,
                            std::min(options_.deadline, absl::Now() + kContainmentWait));
      absl::StrAppend(&message, moved.ok() ? "; moved to quarantine" : "; still in its place: ",
                      moved.message());
    }
    return Failed(LookupStatus::kInvalid, {Stage::kLookup, Reason::kDenied, std::move(message)});
  }

  // By the kind of error, as folder_io.h gives them.
  LookupResult Broken(const absl::Status& status, Reason reason = Reason::kManifestCorrupt) {
    if (absl::IsDataLoss(status) || absl::IsInvalidArgument(status)) {
      return Invalid(reason, status.message());
    }
    return Failed(LookupStatus::kFailed, FailureOf(status, Stage::kLookup, Reason::kIoError));
  }

  // Opens the artifact's folder and locks it; a result ends the look-up.
  std::optional<LookupResult> TakeShared() {
    absl::StatusOr<Descriptor> folder = OpenFolder(*store_.ops, store_.artifacts.get(), key_);
    if (absl::IsNotFound(folder.status())) return Miss();
    if (!folder.ok()) {
      if (fstatat(store_.artifacts.get(), key_.c_str(), &info_, AT_SYMLINK_NOFOLLOW) != 0) {
        return Miss();
      }
      return Broken(folder.status());
    }
    folder_ = *std::move(folder);
    const absl::Status status = Lock(folder_.get(), LockKind::kShared, options_.deadline);
    if (absl::IsDeadlineExceeded(status)) {
      return Failed(LookupStatus::kTimeout,
                    {Stage::kLookup, Reason::kLockTimeout, std::string(status.message())});
    }
    if (!status.ok()) return Broken(status);
    if (fstat(folder_.get(), &info_) != 0) return Broken(IoError("cannot stat the artifact"));
    return std::nullopt;
  }

  std::optional<LookupResult> Open() {
    files_.clear();
    payloads_.clear();
    // A set-group-ID bit comes from the folder above.
    if (info_.st_uid != geteuid() || (info_.st_mode & 0777) != 0700) {
      return Invalid(Reason::kManifestCorrupt, "its folder is not this user's with mode 0700");
    }
    absl::Status status = ReadMetadata();
    if (!status.ok()) return Broken(status);
    if (document_ != nullptr && manifest_->identity.document != *document_) {
      return Invalid(Reason::kManifestIncompatible, "it is the artifact of another identity");
    }
    status = OpenPayloads();
    if (!status.ok()) return Broken(status);
    if (options_.validation == Validation::kFull) {
      status = CheckSums();
      if (!status.ok()) return Broken(status, Reason::kChecksumMismatch);
    }
    const absl::Time start = absl::Now();
    for (size_t c = 0; c < payloads_.size(); ++c) {
      absl::StatusOr<MappedFile> file =
          MappedFile::Map(payloads_[c].file.get(),
                          store_.root / "artifacts" / key_ / PayloadName(manifest_->layout[c]));
      if (!file.ok()) return Broken(absl::UnavailableError(file.status().message()));
      files_.push_back(*std::move(file));
    }
    map_time_ = absl::Now() - start;
    return std::nullopt;
  }

  absl::Status ReadMetadata() {
    struct stat info;
    ASSIGN_OR_RETURN(const Descriptor ready,
                     OpenPublished(*store_.ops, folder_.get(), std::string(kReadyName), &info));
    ASSIGN_OR_RETURN(const std::string ready_bytes,
                     ReadAll(*store_.ops, ready.get(), kReadyBytesMax));
    ASSIGN_OR_RETURN(const Descriptor file,
                     OpenPublished(*store_.ops, folder_.get(), std::string(kManifestName), &info));
    ASSIGN_OR_RETURN(const std::string bytes, ReadAll(*store_.ops, file.get(), kManifestBytesMax));
    ASSIGN_OR_RETURN(Manifest manifest, ParseManifest(bytes));
    RETURN_IF_ERROR(CheckReady(ready_bytes, bytes, manifest));
    if (manifest.identity.key != key_) {
      return absl::DataLossError(absl::StrCat("it is the artifact of ", manifest.identity.key));
    }
    manifest_digest_ = Sha256Of(bytes);
    manifest_ = std::make_unique<const Manifest>(std::move(manifest));

    std::vector<std::string> expected = {std::string(kReadyName), std::string(kManifestName)};
    for (const ArtifactComponent& component : manifest_->layout) {
      expected.push_back(PayloadName(component));
    }
    std::sort(expected.begin(), expected.end());
    ASSIGN_OR_RETURN(const std::vector<std::string> names, ListNames(folder_.get()));
    if (names != expected) return absl::DataLossError("its folder holds other files than its own");
    return absl::OkStatus();
  }

  absl::Status OpenPayloads() {
    for (const ArtifactComponent& component : manifest_->layout) {
      Payload payload;
      const std::string name = PayloadName(component);
      ASSIGN_OR_RETURN(payload.file,
                       OpenPublished(*store_.ops, folder_.get(), name, &payload.info));
      if (payload.info.st_size != PayloadBytes(component)) {
        return absl::DataLossError(absl::StrCat(name, " has ", payload.info.st_size, " bytes, not ",
                                                PayloadBytes(component)));
      }
      payloads_.push_back(std::move(payload));
    }
    return absl::OkStatus();
  }

  // What a passed full check is remembered by: these very files, in this boot.
  std::string CheckRecord() const {
    nlohmann::json files = nlohmann::json::array();
    for (const Payload& payload : payloads_) {
      files.push_back({{"device", payload.info.st_dev},
                       {"inode", payload.info.st_ino},
                       {"size", payload.info.st_size},
                       {"ctime_ns", ChangeTimeNs(payload.info)}});
    }
    return nlohmann::json{{"schema", 1},
                          {"boot", BootId()},
                          {"manifest", manifest_digest_},
                          {"files", std::move(files)}}
        .dump();
  }

  absl::Status CheckSums() {
    const std::string record = CheckRecord();
    const std::string name = key_ + ".json";
    if (remember_ && store_.checks) {
      const absl::StatusOr<std::string> known =
          ReadOwn(*store_.ops, store_.checks.get(), name, kManifestBytesMax);
      if (known.ok() && *known == record) return absl::OkStatus();
    }
    RETURN_IF_ERROR(CheckAllParts());
    // Not flushed: what a crash takes was of the boot that it ended. Losing it costs a check.
    if (!store_.read_only) {
      const std::string temporary = absl::StrCat(key_, ".", RandomHex(8));
      if (WriteNew(*store_.ops, store_.checks.get(), temporary, record, 0600).ok() &&
          store_.ops->RenameAt(store_.checks.get(), temporary.c_str(), store_.checks.get(),
                               name.c_str()) != 0) {
        store_.ops->UnlinkAt(store_.checks.get(), temporary.c_str(), 0);
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckAllParts() {
    struct Piece {
      size_t component;
      int part;
      int64_t offset;
      int64_t extent;
    };
    std::vector<Piece> pieces;
    for (size_t c = 0; c < manifest_->layout.size(); ++c) {
      const ArtifactComponent& component = manifest_->layout[c];
      int64_t offset = 0;
      for (size_t p = 0; p < component.parts.size(); ++p) {
        const int64_t bytes = component.parts[p].bytes;
        const int64_t extent = PartExtent(bytes);
        pieces.push_back({c, static_cast<int>(p), offset, extent});
        offset += extent;
      }
    }
    const auto check = [&](int64_t i) {
      const Piece& piece = pieces[i];
      std::vector<char> buffer(kReadBytes);
      const absl::Status status =
          CheckPart(*store_.ops, payloads_[piece.component].file.get(), piece.offset,
                    manifest_->layout[piece.component].parts[piece.part].bytes, piece.extent,
                    manifest_->part_digests[piece.component][piece.part], &buffer);
      if (status.ok()) return status;
      return absl::Status(status.code(),
                          absl::StrCat(PayloadName(manifest_->layout[piece.component]), ", part ",
                                       piece.part, ": ", status.message()));
    };
    return RunChunks(static_cast<int64_t>(pieces.size()), std::min(options_.threads, kThreadsMax),
                     "validating host weights", check)
        .status();
  }

  LookupResult Hit() {
    nlohmann::json backing = {{"domain", store_.domain_id}, {"files", nlohmann::json::array()}};
    for (const Payload& payload : payloads_) {
      backing["files"].push_back({payload.info.st_dev, payload.info.st_ino, payload.info.st_size});
    }
    Lease lease;
    lease.manifest_ = std::move(manifest_);
    lease.lock_ = std::move(folder_);
    lease.files_ = std::move(files_);
    lease.validation_ = options_.validation;
    lease.backing_fingerprint_ = Sha256Of(backing.dump());
    lease.domain_id_ = store_.domain_id;
    LookupResult result;
    result.status = LookupStatus::kHit;
    result.lease = std::move(lease);
    result.map_time = map_time_;
    return result;
  }

  StoreImpl& store_;
  const std::string& key_;
  const std::string* const document_;
  const LookupOptions& options_;
  const bool remember_;

  Descriptor folder_;
  struct stat info_{};  // of the folder
  std::unique_ptr<const Manifest> manifest_;
  std::string manifest_digest_;
  std::vector<Payload> payloads_;
  std::vector<MappedFile> files_;
  absl::Duration map_time_;
};

LookupResult StoreImpl::Lookup(const std::string& key, const std::string* document,
                               const LookupOptions& options, bool remember) {
  return LookupJob(*this, key, document, options, remember).Run();
}

}  // namespace dlo::hwr
