#include "server/compatibility_key.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace dlo {
namespace {

constexpr char kScheduleField[] = "schedule";

// nlohmann-json writes these as null, so that two of them would be equal.
bool AllFinite(const nlohmann::json& value) {
  if (value.is_number_float()) return std::isfinite(value.get<double>());
  if (!value.is_structured()) return true;
  for (const nlohmann::json& element : value) {
    if (!AllFinite(element)) return false;
  }
  return true;
}

}  // namespace

absl::StatusOr<std::string> CompatibilityKey(const VideoSettings& settings,
                                             v1::OutputFormat output_format,
                                             const nlohmann::json& extras) {
  nlohmann::json key = {{"width", settings.width},
                        {"height", settings.height},
                        {"frames", settings.num_frames},
                        {"fps", settings.fps},
                        {"steps", settings.num_inference_steps},
                        {"solver", settings.solver},
                        {"flow_shift", settings.flow_shift},
                        {"guided", settings.guidance_scale > 1},
                        {"guidance_scale", settings.guidance_scale},
                        // Of the second expert; null for a model that has none.
                        {"guidance_scale_2", nullptr},
                        {"output_format", static_cast<int>(output_format)},
                        {"extras", extras}};
  if (settings.guidance_scale_2) key["guidance_scale_2"] = *settings.guidance_scale_2;
  if (!AllFinite(key)) {
    return absl::InvalidArgumentError("settings or extra: a number is not finite");
  }
  try {
    return key.dump();
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("settings or extra: ", error.what()));
  }
}

std::vector<std::string> DifferingFields(const std::string& a, const std::string& b) {
  if (a == b) return {};
  const auto parse = [](const std::string& key) {
    return nlohmann::json::parse(key, nullptr, /*allow_exceptions=*/false);
  };
  const nlohmann::json first = parse(a), second = parse(b);
  if (!first.is_object() || !second.is_object()) return {kScheduleField};
  std::vector<std::string> fields;
  for (const auto& [field, value] : first.items()) {
    if (second.value(field, nlohmann::json()) != value) fields.push_back(field);
  }
  return fields;
}

const std::vector<std::string>& CompatibilityFields() {
  static const auto* const fields = [] {
    auto* const names = new std::vector<std::string>{kScheduleField};
    // Every key has every field.
    const nlohmann::json key = nlohmann::json::parse(
        CompatibilityKey({}, v1::OUTPUT_FORMAT_MP4, nlohmann::json::object()).value());
    for (const auto& [field, value] : key.items()) names->push_back(field);
    return names;
  }();
  return *fields;
}

}  // namespace dlo
