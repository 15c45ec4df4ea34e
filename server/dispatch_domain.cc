#include "server/dispatch_domain.h"

namespace dlo {

std::vector<int> DispatchDomain::ranks() const {
  std::vector<int> all;
  for (const std::vector<int>& replica : replicas) {
    all.insert(all.end(), replica.begin(), replica.end());
  }
  return all;
}

std::vector<DispatchDomain> DispatchDomains(const Topology& topology, WeightTransfer transfer) {
  std::vector<DispatchDomain> domains;
  for (const std::vector<Replica>& joined : topology.DispatchDomains(transfer)) {
    DispatchDomain& domain = domains.emplace_back();
    for (Replica replica : joined) {
      std::vector<int>& ranks = domain.replicas.emplace_back();
      // The primary is a replica's first rank.
      for (Rank rank : topology.Group(GroupKind::kReplica, topology.Primary(replica))) {
        ranks.push_back(rank.value);
      }
    }
  }
  return domains;
}

std::vector<DispatchDomain> IndependentReplicas(int count) {
  std::vector<DispatchDomain> domains;
  for (int rank = 0; rank < count; ++rank) domains.push_back({{{rank}}});
  return domains;
}

std::vector<DispatchDomain> JoinedReplicas(int count) {
  std::vector<DispatchDomain> domains(1);
  for (int rank = 0; rank < count; ++rank) domains[0].replicas.push_back({rank});
  return domains;
}

int CountRanks(const std::vector<DispatchDomain>& domains) {
  size_t count = 0;
  for (const DispatchDomain& domain : domains) count += domain.ranks().size();
  return static_cast<int>(count);
}

}  // namespace dlo
