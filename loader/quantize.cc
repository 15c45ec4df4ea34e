#include "loader/quantize.h"

#include <algorithm>
#include <cfloat>
#include <cstring>

#include "base/clones.h"
#include "loader/cast.h"
#include "loader/float_bits.h"
#include "loader/stream_memory.h"

namespace dlo {
namespace {

// Values are converted to float32 so many at a time, in memory that stays in the nearest cache.
constexpr size_t kStrip = 2048;

// Without branches, so that the loops below become vector code.
DLO_INLINE uint32_t ToE4M3(float value) {
  const uint32_t bits = Bits(value);
  const uint32_t sign = bits >> 24 & 0x80;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t rebased = magnitude - (120u << 23);  // exponent bias 127 -> 7
  const uint32_t normal = (rebased + 0x7FFFF + (rebased >> 20 & 1)) >> 20;
  // One unit in the last place of 2^14 is 2^-9, the smallest step: the addition rounds to a count
  // of those.
  const uint32_t subnormal = Bits(FromBits(magnitude) + 16384.0f) - Bits(16384.0f);
  uint32_t result = magnitude < 0x3C800000 ? subnormal : normal;  // 2^-6
  result = result > 0x7E ? 0x7E : result;                         // 448
  result = magnitude > 0x7F800000 ? 0x7F : result;                // NaN
  return result | sign;
}

DLO_INLINE float FromE4M3(uint8_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x80) << 24;
  const uint32_t magnitude = value & 0x7F;
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  // A subnormal is a count of 2^-9, which F32 holds exactly.
  const uint32_t subnormal = Bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f);
  uint32_t bits = magnitude < 8 ? subnormal : normal;
  bits = magnitude == 0x7F ? 0x7FC00000 : bits;
  return FromBits(bits | sign);
}

template <typename T>
DLO_INLINE T MaxOf(const std::byte* source, size_t count, T mask) {
  T result = 0;
  for (size_t i = 0; i < count; ++i) {
    T bits;
    std::memcpy(&bits, source + i * sizeof(bits), sizeof(bits));
    bits &= mask;
    result = result > bits ? result : bits;
  }
  return result;
}

template <typename T>
DLO_INLINE T MaxOfMany(const std::byte* source, size_t count, T mask) {
  constexpr size_t kUnit = 256 / sizeof(T);
  T lanes[kUnit] = {};
  const size_t done =
      ForUnits<256>(source, count * sizeof(T), [&](size_t at) __attribute__((always_inline)) {
        for (size_t i = 0; i < kUnit; ++i) {
          T bits;
          std::memcpy(&bits, source + at + i * sizeof(bits), sizeof(bits));
          bits &= mask;
          lanes[i] = lanes[i] > bits ? lanes[i] : bits;
        }
      });
  const T rest = MaxOf(source + done, count - done / sizeof(T), mask);
  const T most = MaxOf(reinterpret_cast<const std::byte*>(lanes), kUnit, mask);
  return most > rest ? most : rest;
}

DLO_CLONES uint32_t MaxMagnitudeOfFloats(const std::byte* source, size_t count) {
  return MaxOfMany<uint32_t>(source, count, 0x7FFFFFFF);
}

// F16 or BF16, in that format: their bits order like magnitudes, too.
DLO_CLONES uint16_t MaxMagnitudeOf16Bits(const std::byte* source, size_t count) {
  return MaxOfMany<uint16_t>(source, count, 0x7FFF);
}

DLO_INLINE void QuantizeSome(const std::byte* __restrict source, float scale,
                             std::byte* __restrict destination, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, source + i * sizeof(value), sizeof(value));
    destination[i] = static_cast<std::byte>(ToE4M3(value / scale));
  }
}

DLO_CLONES void QuantizeFloats(const std::byte* __restrict source, float scale,
                               std::byte* __restrict destination, size_t count) {
  size_t done = 0;
  if (reinterpret_cast<uintptr_t>(destination) % 16 == 0) {
    // By value: a reference might be to what is stored to.
    done = ForUnits<256>(source, count * sizeof(float),
                         [=](size_t at) __attribute__((always_inline)) {
                           StreamedUnit<64> unit;
                           QuantizeSome(source + at, scale, unit.bytes, 64);
                           unit.Store(destination + at / sizeof(float));
                         }) /
           sizeof(float);
    EndStores();
  }
  QuantizeSome(source + done * sizeof(float), scale, destination + done, count - done);
}

DLO_CLONES void DequantizeToFloats(const std::byte* __restrict source, float scale,
                                   std::byte* __restrict destination, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const float value = FromE4M3(static_cast<uint8_t>(source[i])) * scale;
    std::memcpy(destination + i * sizeof(value), &value, sizeof(value));
  }
}

DLO_CLONES void DequantizeToBFloat16(const std::byte* __restrict source, float scale,
                                     std::byte* __restrict destination, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const float value = FromE4M3(static_cast<uint8_t>(source[i])) * scale;
    const uint32_t bits = Bits(value);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const auto out =
        static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? bits >> 16 | 0x40 : rounded);
    std::memcpy(destination + i * sizeof(out), &out, sizeof(out));
  }
}

// Calls use(floats, first, n) for strips of the source as float32.
template <typename Use>
void ForStrips(DType from, const std::byte* source, size_t count, Use use) {
  if (from == DType::kF32) return use(source, size_t{0}, count);
  alignas(64) std::byte strip[kStrip * sizeof(float)];
  const auto bytes = static_cast<size_t>(DTypeBytes(from));
  for (size_t first = 0; first < count; first += kStrip) {
    const size_t n = std::min(kStrip, count - first);
    CastElements(from, source + first * bytes, DType::kF32, strip, n);
    use(strip, first, n);
  }
}

}  // namespace

bool CanQuantize(DType from) { return CanCast(from, DType::kF32); }

uint32_t MaxMagnitudeBits(DType from, const std::byte* source, size_t count) {
  uint32_t result = 0;
  if (!CanQuantize(from)) return result;
  if (DTypeBytes(from) == 2) {
    const uint16_t max = MaxMagnitudeOf16Bits(source, count);
    CastElements(from, reinterpret_cast<const std::byte*>(&max), DType::kF32,
                 reinterpret_cast<std::byte*>(&result), 1);
    return result;
  }
  ForStrips(from, source, count, [&](const std::byte* floats, size_t, size_t n) {
    result = std::max(result, MaxMagnitudeOfFloats(floats, n));
  });
  return result;
}

bool IsFiniteMagnitude(uint32_t bits) { return bits < 0x7F800000; }

float E4M3Scale(uint32_t max_magnitude_bits) {
  if (max_magnitude_bits == 0) return 1;
  return std::max(FromBits(max_magnitude_bits) / kE4M3Max, FLT_MIN);
}

void QuantizeE4M3(DType from, const std::byte* source, float scale, std::byte* destination,
                  size_t count) {
  if (!CanQuantize(from)) return;
  ForStrips(from, source, count, [&](const std::byte* floats, size_t first, size_t n) {
    QuantizeFloats(floats, scale, destination + first, n);
  });
}

void DequantizeE4M3(const std::byte* source, float scale, DType to, std::byte* destination,
                    size_t count) {
  if (to == DType::kF32) DequantizeToFloats(source, scale, destination, count);
  if (to == DType::kBF16) DequantizeToBFloat16(source, scale, destination, count);
}

}  // namespace dlo
