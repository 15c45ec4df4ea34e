#include "server/metrics_server.h"

#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/bind_error.h"

namespace dlo {

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& listen, std::vector<std::shared_ptr<prometheus::Collectable>> collectables) {
  std::unique_ptr<prometheus::Exposer> exposer;
  try {
    exposer = std::make_unique<prometheus::Exposer>(listen);
  } catch (const std::exception& error) {
    const std::string why = FindBindError(listen);
    return absl::UnavailableError(absl::StrCat(
        "metrics_listen is \"", listen,
        "\", but nothing can listen there: ", why.empty() ? error.what() : why,
        "; choose another address (port 0: any free one), or leave it empty for no metrics"));
  }
  for (const auto& collectable : collectables) exposer->RegisterCollectable(collectable);
  std::string address =
      absl::StrCat(listen.substr(0, listen.rfind(':')), ":", exposer->GetListeningPorts().at(0));
  return std::unique_ptr<MetricsServer>(
      new MetricsServer(std::move(collectables), std::move(exposer), std::move(address)));
}

}  // namespace dlo
