// What reader and writer of safetensors share. Internal to loader/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/types/span.h"
#include "base/dtype.h"

namespace dlo {

inline constexpr int64_t kSafetensorsLengthBytes = 8;
inline constexpr uint64_t kSafetensorsHeaderBytesMax =
    100'000'000;  // as the reference implementation
inline constexpr size_t kSafetensorsRankMax = 64;
inline constexpr char kSafetensorsMetadataKey[] = "__metadata__";

// nullopt: negative or more than an int64_t holds.
inline std::optional<int64_t> TensorBytes(absl::Span<const int64_t> shape, DType dtype) {
  int64_t bytes = 1;
  for (int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  if (__builtin_mul_overflow(bytes, DTypeBytes(dtype), &bytes)) return std::nullopt;
  return bytes;
}

}  // namespace dlo
