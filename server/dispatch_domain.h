// The ranks that work on waves together and fail together.
//
//   std::vector<DispatchDomain> domains = DispatchDomains(topology, WeightTransfer::kNone);
//
// A value.
#pragma once

#include <vector>

#include "base/topology.h"

namespace dlo {

// The replicas joined by weight collectives; where there are none, a replica alone.
struct DispatchDomain {
  // The ranks of each replica, its primary first. Numbered from 0 within the domain.
  std::vector<std::vector<int>> replicas;

  // Requests in a full wave.
  int capacity() const { return static_cast<int>(replicas.size()); }
  bool collective() const { return replicas.size() > 1; }
  std::vector<int> ranks() const;
};

// Of all ranks, in their order.
std::vector<DispatchDomain> DispatchDomains(const Topology& topology, WeightTransfer transfer);

// `count` replicas of one rank each: on their own, or joined in one domain.
std::vector<DispatchDomain> IndependentReplicas(int count);
std::vector<DispatchDomain> JoinedReplicas(int count);

int CountRanks(const std::vector<DispatchDomain>& domains);

}  // namespace dlo
