// How weights are quantised while they are loaded.
//
//   ASSIGN_OR_RETURN(OnlineQuantization quantization, ParseOnlineQuantization("fp8"));
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dlo {

// kPerTensorFp8: F8_E4M3 with a scale for each linear layer. kOther stands, where rules are
// checked, for methods that are not there.
enum class OnlineQuantization : uint8_t { kNone, kPerTensorFp8, kOther };

// INVALID_ARGUMENT unless `name` is "none" or "fp8".
absl::StatusOr<OnlineQuantization> ParseOnlineQuantization(absl::string_view name);
absl::string_view OnlineQuantizationName(OnlineQuantization quantization);

}  // namespace dlo
