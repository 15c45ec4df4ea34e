// Element types of checkpoints and of the run, without libtorch. Names follow the safetensors
// format.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dlo {

enum class DType : uint8_t {
  kF32,
  kF16,
  kBF16,
  kF64,
  kI64,
  kI32,
  kI16,
  kI8,
  kU8,
  kBool,
  kF8E4M3,
  kF8E5M2
};

// Bytes of one element.
int64_t DTypeBytes(DType dtype);

// "F32", "BF16", ... as in a safetensors header.
absl::string_view DTypeName(DType dtype);

// The inverse of DTypeName. INVALID_ARGUMENT for a name that is not in the enum.
absl::StatusOr<DType> ParseDType(absl::string_view name);

}  // namespace dlo
