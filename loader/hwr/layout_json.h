// A layout as the "components" of a manifest. Internal to loader/hwr/. Pure.
#pragma once

#include <string>
#include <vector>

#include "loader/hwr/layout.h"
#include "nlohmann/json.hpp"

namespace dlo::hwr {

// Of a checked layout; with each part's digest if there are any.
nlohmann::json LayoutJson(const ArtifactLayout& layout,
                          const std::vector<std::vector<std::string>>* part_digests);

}  // namespace dlo::hwr
