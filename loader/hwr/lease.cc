#include "loader/hwr/lease.h"

#include "absl/status/status.h"

namespace dlo::hwr {

int Lease::FindComponent(absl::string_view name) const {
  for (size_t i = 0; i < layout().size(); ++i) {
    if (layout()[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

absl::Span<const std::byte> Lease::part(int component, int part) const {
  const ArtifactComponent& c = layout()[component];
  return files_[component].bytes().subspan(PartOffset(c, part), c.parts[part].bytes);
}

absl::StatusOr<Lease> LeaseCarrier::Take() {
  if (!lease_) return absl::FailedPreconditionError("the lease was taken already");
  absl::StatusOr<Lease> lease = *std::move(lease_);
  lease_.reset();
  return lease;
}

}  // namespace dlo::hwr
