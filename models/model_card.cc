#include "models/model_card.h"

#include "models/wan/wan_card.h"

namespace dlo {

absl::StatusOr<std::unique_ptr<ModelCard>> ReadModelCard(const std::filesystem::path& root) {
  // The only family there is: it refuses another pipeline class by name.
  return ReadWanCard(root);
}

}  // namespace dlo
