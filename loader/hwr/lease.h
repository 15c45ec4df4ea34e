// The right to use an artifact's bytes, and the bytes.
//
//   LookupResult found = store->Lookup(identity, options);
//   absl::Span<const std::byte> block = found.lease->part(transformer, 1 + b);
//   LeaseCarrier carrier(*std::move(found.lease));
//   ...
//   Lease lease = carrier.Take();   // once
//
// Payloads are mapped read-only and shared: a write through a span ends the process, and processes
// that hold leases of one artifact share its pages. While a lease lives, nobody removes the
// artifact. It may be found corrupt and be moved away meanwhile: the mapping stays what it was.
//
// The lock ends with the process. After a fork the child's copy neither keeps nor frees it once the
// child ends. const members may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "base/mapped_file.h"
#include "loader/hwr/descriptor.h"
#include "loader/hwr/manifest.h"
#include "loader/hwr/outcome.h"

namespace dlo::hwr {

class Lease {
 public:
  Lease(Lease&&) = default;
  Lease& operator=(Lease&&) = default;
  ~Lease() = default;

  const Identity& identity() const { return manifest_->identity; }
  const Manifest& manifest() const { return *manifest_; }
  const ArtifactLayout& layout() const { return manifest_->layout; }

  // -1: there is none.
  int FindComponent(absl::string_view name) const;
  // The mapping of a component's payload; PackPiece::file of its parts.
  const MappedFile& file(int component) const { return files_[component]; }
  absl::Span<const std::byte> part(int component, int part) const;
  int64_t bytes() const { return PayloadBytes(manifest_->layout); }

  Validation validation() const { return validation_; }
  // SHA-256 over the domain's id and device, inode and size of each file: equal in two processes
  // exactly if their mappings share pages.
  const std::string& backing_fingerprint() const { return backing_fingerprint_; }
  const std::string& domain_id() const { return domain_id_; }

 private:
  friend class LookupJob;

  Lease() = default;

  std::unique_ptr<const Manifest> manifest_;
  Descriptor lock_;                // of the artifact's folder, with a shared lock; freed last
  std::vector<MappedFile> files_;  // one for each component
  Validation validation_ = Validation::kMetadata;
  std::string backing_fingerprint_;
  std::string domain_id_;
};

// A lease on its way from the loader to the backend that will own it: taken once, or freed with the
// carrier. Can neither be copied nor written down. Belongs to one thread.
class LeaseCarrier {
 public:
  explicit LeaseCarrier(Lease lease) : lease_(std::move(lease)) {}
  LeaseCarrier(LeaseCarrier&& other) noexcept : lease_(std::move(other.lease_)) {
    other.lease_.reset();
  }
  LeaseCarrier& operator=(LeaseCarrier&&) = delete;

  bool holds() const { return lease_.has_value(); }
  const Lease& peek() const { return *lease_; }
  // FAILED_PRECONDITION the second time.
  absl::StatusOr<Lease> Take();

 private:
  std::optional<Lease> lease_;
};

}  // namespace dlo::hwr
