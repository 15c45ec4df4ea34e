#include "loader/cast.h"

#include <cstdint>
#include <cstring>

namespace dlo {
namespace {

uint32_t Bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Each format converts to and from F32 without branches, so that the loops below become vector
// code.
struct F32 {
  using Storage = float;
  static float ToFloat(float value) { return value; }
  static float FromFloat(float value) { return value; }
};

struct F64 {
  using Storage = double;
  static float ToFloat(double value) { return static_cast<float>(value); }
};

struct BF16 {
  using Storage = uint16_t;
  static float ToFloat(uint16_t value) { return FromBits(static_cast<uint32_t>(value) << 16); }
  static uint16_t FromFloat(float value) {
    const uint32_t bits = Bits(value);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const uint32_t quiet_nan = bits >> 16 | 0x40;
    return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? quiet_nan : rounded);
  }
};

struct F16 {
  using Storage = uint16_t;
  static float ToFloat(uint16_t value) {
    const uint32_t sign = static_cast<uint32_t>(value & 0x8000) << 16;
    const uint32_t magnitude = value & 0x7FFF;
    const uint32_t normal = (magnitude << 13) + (112u << 23);  // exponent bias 15 -> 127
    const uint32_t special = magnitude << 13 | 0x7F800000;
    // A subnormal is a count of 2^-24, which F32 holds exactly.
    const uint32_t subnormal = Bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    uint32_t bits = magnitude < 0x400 ? subnormal : normal;
    bits = magnitude >= 0x7C00 ? special : bits;
    return FromBits(bits | sign);
  }
  static uint16_t FromFloat(float value) {
    const uint32_t bits = Bits(value);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t magnitude = bits & 0x7FFFFFFF;
    const uint32_t rebased = magnitude - (112u << 23);  // exponent bias 127 -> 15
    uint32_t normal = (rebased + 0xFFF + (rebased >> 13 & 1)) >> 13;
    normal = magnitude >= 0x47800000
                 ? 0x7C00
                 : normal;  // 2^16 and above; below, rounding carries into infinity by itself
    // One unit in the last place of 0.5 is 2^-24, F16's smallest step: the addition rounds to a
    // count of those.
    const uint32_t subnormal = Bits(FromBits(magnitude) + 0.5f) - Bits(0.5f);
    const uint32_t quiet_nan = (magnitude >> 13 & 0x3FF) | 0x7E00;
    uint32_t result = magnitude < 0x38800000 ? subnormal : normal;  // 2^-14
    result = magnitude > 0x7F800000 ? quiet_nan : result;
    return static_cast<uint16_t>(result | sign);
  }
};

template <typename From, typename To>
void Cast(const std::byte* __restrict source, std::byte* __restrict destination, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    typename From::Storage in;
    std::memcpy(&in, source + i * sizeof(in), sizeof(in));
    const typename To::Storage out = To::FromFloat(From::ToFloat(in));
    std::memcpy(destination + i * sizeof(out), &out, sizeof(out));
  }
}

using CastFunction = void (*)(const std::byte*, std::byte*, size_t);

template <typename To>
CastFunction CastTo(DType from) {
  switch (from) {
    case DType::kF32:
      return Cast<F32, To>;
    case DType::kF16:
      return Cast<F16, To>;
    case DType::kBF16:
      return Cast<BF16, To>;
    case DType::kF64:
      return Cast<F64, To>;
    default:
      return nullptr;
  }
}

CastFunction FindCast(DType from, DType to) {
  switch (to) {
    case DType::kF32:
      return CastTo<F32>(from);
    case DType::kF16:
      return CastTo<F16>(from);
    case DType::kBF16:
      return CastTo<BF16>(from);
    default:
      return nullptr;
  }
}

}  // namespace

bool CanCast(DType from, DType to) { return from == to || FindCast(from, to) != nullptr; }

void CastElements(DType from, const std::byte* source, DType to, std::byte* destination,
                  size_t count) {
  if (from == to) {
    if (count > 0) std::memcpy(destination, source, count * static_cast<size_t>(DTypeBytes(from)));
  } else if (CastFunction cast = FindCast(from, to)) {
    cast(source, destination, count);
  }
}

}  // namespace dlo
