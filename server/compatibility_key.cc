#include "server/compatibility_key.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace dlo {
namespace {

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

absl::StatusOr<std::string> CompatibilityKey(WaveCompatibility compatibility,
                                             const VideoSettings& settings,
                                             v1::OutputFormat output_format,
                                             const nlohmann::json& extras) {
  nlohmann::json key = {{"steps", settings.num_inference_steps},
                        {"solver", settings.solver},
                        {"flow_shift", settings.flow_shift},
                        {"guided", settings.guidance_scale > 1},
                        // Of the second expert; null for a model that has none.
                        {"guided_2", nullptr},
                        {"extras", extras}};
  if (settings.guidance_scale_2) key["guided_2"] = *settings.guidance_scale_2 > 1;
  if (compatibility == WaveCompatibility::kStrict) {
    key["width"] = settings.width;
    key["height"] = settings.height;
    key["frames"] = settings.num_frames;
    key["fps"] = settings.fps;
    key["guidance_scale"] = settings.guidance_scale;
    if (settings.guidance_scale_2) key["guidance_scale_2"] = *settings.guidance_scale_2;
    key["output_format"] = static_cast<int>(output_format);
  }
  if (!AllFinite(key)) {
    return absl::InvalidArgumentError("settings or extra: a number is not finite");
  }
  try {
    return key.dump();
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("settings or extra: ", error.what()));
  }
}

}  // namespace dlo
