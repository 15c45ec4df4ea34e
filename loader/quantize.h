// Per-tensor quantisation to F8_E4M3: one float32 scale, and each value over it as an 8-bit float.
//
//   const uint32_t bits = MaxMagnitudeBits(DType::kBF16, source, count);
//   if (!IsFiniteMagnitude(bits)) return absl::InvalidArgumentError(...);
//   const float scale = E4M3Scale(bits);
//   QuantizeE4M3(DType::kBF16, source, scale, destination, count);
//   DequantizeE4M3(destination, scale, DType::kBF16, values, count);
//
// F8_E4M3 is the format of 4 exponent and 3 mantissa bits without infinities: its largest value is
// 448, its smallest step 2^-9. Source: OCP OFP8 1.0; scale and rounding as in vLLM.
//
// Pointers need no alignment; ranges must not overlap. Stateless, any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace dlo {

inline constexpr float kE4M3Max = 448;

// What CastElements casts to F32 can be quantised.
bool CanQuantize(DType from);

// The magnitude of the largest value as the bits of a float32, which order like magnitudes: the
// larger of two results is that of both parts. NaN is above infinity, that above all others. 0 for
// no values.
uint32_t MaxMagnitudeBits(DType from, const std::byte* source, size_t count);
bool IsFiniteMagnitude(uint32_t bits);

// The scale that maps the magnitude to kE4M3Max; 1 for 0. Never below the smallest normal float32.
float E4M3Scale(uint32_t max_magnitude_bits);

// Each value, in float32, over `scale`, rounded to nearest even; beyond +-448: +-448.
// CanQuantize(from) must hold; otherwise nothing happens.
void QuantizeE4M3(DType from, const std::byte* source, float scale, std::byte* destination,
                  size_t count);

// Each value times `scale` in float32, rounded to `to`, F32 or BF16 (otherwise nothing happens).
void DequantizeE4M3(const std::byte* source, float scale, DType to, std::byte* destination,
                    size_t count);

}  // namespace dlo
