// Serves metrics as Prometheus text at http://HOST:PORT/metrics.
//
//   ASSIGN_OR_RETURN(auto server, MetricsServer::Start("127.0.0.1:0", metrics.collectables()));
//   server->address();  // "127.0.0.1:43211"
//
// Answers on threads of its own until it is destroyed, which takes them up to 2 s; keeps what it
// collects from alive. Plain HTTP, for whoever reaches the address.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/exposer.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace dlo {

class MetricsServer {
 public:
  // `listen`: HOST:PORT (port 0: any free one). UNAVAILABLE, with the reason, if it cannot be
  // bound.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(
      const std::string& listen,
      std::vector<std::shared_ptr<prometheus::Collectable>> collectables);

  // With the port that was chosen.
  const std::string& address() const { return address_; }

 private:
  MetricsServer(std::vector<std::shared_ptr<prometheus::Collectable>> collectables,
                std::unique_ptr<prometheus::Exposer> exposer, std::string address)
      : collectables_(std::move(collectables)),
        exposer_(std::move(exposer)),
        address_(std::move(address)) {}

  const std::vector<std::shared_ptr<prometheus::Collectable>> collectables_;
  const std::unique_ptr<prometheus::Exposer> exposer_;
  const std::string address_;
};

}  // namespace dlo
