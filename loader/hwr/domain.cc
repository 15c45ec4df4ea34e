#include "loader/hwr/domain.h"

#include <cstdint>

#include "base/json.h"
#include "base/status_macros.h"
#include "loader/hwr/strict_json.h"
#include "nlohmann/json.hpp"

namespace dlo::hwr {
namespace {

using nlohmann::json;

constexpr int kSchema = 1;
constexpr char kScope[] = "node";
constexpr char kEviction[] = "least-recent-lease";

}  // namespace

std::string WriteDomain(const Domain& domain) {
  return json{{"schema", kSchema},
              {"id", domain.id},
              {"scope", kScope},
              {"storage_class", domain.storage_class},
              {"filesystem", domain.filesystem}}
      .dump();
}

std::string WritePolicy(const StorePolicy& policy) {
  return json{{"schema", kSchema},
              {"max_store_bytes", policy.max_store_bytes},
              {"max_artifact_bytes", policy.max_artifact_bytes},
              {"min_free_bytes", policy.min_free_bytes},
              {"eviction", kEviction}}
      .dump();
}

absl::StatusOr<Domain> ParseDomain(absl::string_view bytes) {
  ASSIGN_OR_RETURN(const json value, ParseJson(bytes, kDomainName));
  StrictObject object(value, kDomainName);
  object.Int("schema", kSchema, kSchema);
  Domain domain;
  domain.id = object.Word("id");
  object.Word("scope");
  domain.storage_class = object.Word("storage_class");
  domain.filesystem = object.Word("filesystem");
  RETURN_IF_ERROR(object.Finish());
  if (WriteDomain(domain) != bytes) {
    return absl::InvalidArgumentError("domain.json: not as it was written");
  }
  return domain;
}

absl::StatusOr<StorePolicy> ParsePolicy(absl::string_view bytes) {
  ASSIGN_OR_RETURN(const json value, ParseJson(bytes, kPolicyName));
  StrictObject object(value, kPolicyName);
  object.Int("schema", kSchema, kSchema);
  StorePolicy policy;
  policy.max_store_bytes = object.Int("max_store_bytes", 0, INT64_MAX);
  policy.max_artifact_bytes = object.Int("max_artifact_bytes", 0, INT64_MAX);
  policy.min_free_bytes = object.Int("min_free_bytes", 0, INT64_MAX);
  object.Word("eviction");
  RETURN_IF_ERROR(object.Finish());
  if (WritePolicy(policy) != bytes) {
    return absl::InvalidArgumentError("domain-policy.json: not as it was written");
  }
  return policy;
}

}  // namespace dlo::hwr
