// The two documents of a store: domain.json says what it is, domain-policy.json its limits. Written
// once, by who makes the store. Internal to loader/hwr/. Pure.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "loader/hwr/store.h"

namespace dlo::hwr {

inline constexpr char kDomainName[] = "domain.json";
inline constexpr char kPolicyName[] = "domain-policy.json";
inline constexpr int64_t kDocumentBytesMax = 4096;

struct Domain {
  std::string id;  // 32 random hexadecimal digits
  std::string storage_class;
  std::string filesystem;
};

std::string WriteDomain(const Domain& domain);
std::string WritePolicy(const StorePolicy& policy);

// INVALID_ARGUMENT for anything that the writers would not write.
absl::StatusOr<Domain> ParseDomain(absl::string_view bytes);
absl::StatusOr<StorePolicy> ParsePolicy(absl::string_view bytes);

}  // namespace dlo::hwr
