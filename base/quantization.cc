#include "base/quantization.h"

#include "absl/strings/str_cat.h"

namespace dlo {

absl::StatusOr<OnlineQuantization> ParseOnlineQuantization(absl::string_view name) {
  for (OnlineQuantization known : {OnlineQuantization::kNone, OnlineQuantization::kPerTensorFp8}) {
    if (name == OnlineQuantizationName(known)) return known;
  }
  return absl::InvalidArgumentError(absl::StrCat("\"", name, "\" is not one of \"none\", \"fp8\""));
}

absl::string_view OnlineQuantizationName(OnlineQuantization quantization) {
  switch (quantization) {
    case OnlineQuantization::kNone:
      return "none";
    case OnlineQuantization::kPerTensorFp8:
      return "fp8";
    case OnlineQuantization::kOther:
      return "other";
  }
  return "?";
}

}  // namespace dlo
