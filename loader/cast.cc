#include "loader/cast.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "loader/float_bits.h"
#include "loader/stream_memory.h"

namespace dlo {
namespace {

// Below it the result may well be wanted from the cache.
constexpr size_t kStreamedBytesMin = 256 << 10;

// Each format converts to and from F32 without branches, so that the loops below become vector
// code.
struct F32 {
  using Storage = float;
  static DLO_INLINE float ToFloat(float value) { return value; }
  static DLO_INLINE float FromFloat(float value) { return value; }
};

struct F64 {
  using Storage = double;
  static DLO_INLINE float ToFloat(double value) { return static_cast<float>(value); }
};

struct BF16 {
  using Storage = uint16_t;
  static DLO_INLINE float ToFloat(uint16_t value) {
    return FromBits(static_cast<uint32_t>(value) << 16);
  }
  static DLO_INLINE uint16_t FromFloat(float value) {
    const uint32_t bits = Bits(value);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const uint32_t quiet_nan = bits >> 16 | 0x40;
    return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? quiet_nan : rounded);
  }
};

struct F16 {
  using Storage = uint16_t;
  static DLO_INLINE float ToFloat(uint16_t value) {
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
  static DLO_INLINE uint16_t FromFloat(float value) {
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
DLO_INLINE void CastSome(const std::byte* __restrict source, std::byte* __restrict destination,
                         size_t count) {
  for (size_t i = 0; i < count; ++i) {
    typename From::Storage in;
    std::memcpy(&in, source + i * sizeof(in), sizeof(in));
    const typename To::Storage out = To::FromFloat(From::ToFloat(in));
    std::memcpy(destination + i * sizeof(out), &out, sizeof(out));
  }
}

// How many elements of `bytes` bytes lie before the first at a multiple of 64; all `count` if none
// does.
size_t ElementsBeforeAlignment(const std::byte* at, size_t bytes, size_t count) {
  const size_t short_of = (64 - reinterpret_cast<uintptr_t>(at) % 64) % 64;
  return short_of % bytes == 0 ? std::min(short_of / bytes, count) : count;
}

template <typename From, typename To>
DLO_INLINE void CastLoop(const std::byte* __restrict source, std::byte* __restrict destination,
                         size_t count) {
  constexpr size_t kIn = sizeof(typename From::Storage), kOut = sizeof(typename To::Storage);
  constexpr size_t kElements = 64;  // of a unit
  if (count * kIn >= kStreamedBytesMin) {
    const size_t head = ElementsBeforeAlignment(destination, kOut, count);
    CastSome<From, To>(source, destination, head);
    source += head * kIn;
    destination += head * kOut;
    count -= head;
    const size_t streamed =
        ForUnits<kElements * kIn>(source, count * kIn,
                                  [&](size_t at) __attribute__((always_inline)) {
                                    StreamedUnit<kElements * kOut> unit;
                                    CastSome<From, To>(source + at, unit.bytes, kElements);
                                    unit.Store(destination + at / kIn * kOut);
                                  }) /
        kIn;
    EndStores();
    source += streamed * kIn;
    destination += streamed * kOut;
    count -= streamed;
  }
  CastSome<From, To>(source, destination, count);
}

// A template cannot be compiled for several instruction sets.
#define DLO_CAST(From, To)                                                                        \
  DLO_CLONES void From##To##Cast(const std::byte* source, std::byte* destination, size_t count) { \
    CastLoop<From, To>(source, destination, count);                                               \
  }
DLO_CAST(F16, F32)
DLO_CAST(BF16, F32)
DLO_CAST(F64, F32)
DLO_CAST(F32, F16)
DLO_CAST(BF16, F16)
DLO_CAST(F64, F16)
DLO_CAST(F32, BF16)
DLO_CAST(F16, BF16)
DLO_CAST(F64, BF16)
#undef DLO_CAST

DLO_CLONES void Copy(const std::byte* __restrict source, std::byte* __restrict destination,
                     size_t bytes) {
  if (bytes >= kStreamedBytesMin) {
    const size_t head = ElementsBeforeAlignment(destination, 1, bytes);
    std::memcpy(destination, source, head);
    source += head;
    destination += head;
    bytes -= head;
    const size_t streamed =
        ForUnits<64>(source, bytes, [&](size_t at) __attribute__((always_inline)) {
          StreamedUnit<64> unit;
          std::memcpy(unit.bytes, source + at, 64);
          unit.Store(destination + at);
        });
    EndStores();
    source += streamed;
    destination += streamed;
    bytes -= streamed;
  }
  if (bytes > 0) std::memcpy(destination, source, bytes);
}

using CastFunction = void (*)(const std::byte*, std::byte*, size_t);

CastFunction FindCast(DType from, DType to) {
  struct Row {
    DType from, to;
    CastFunction cast;
  };
  static constexpr Row kRows[] = {
      {DType::kF16, DType::kF32, F16F32Cast},   {DType::kBF16, DType::kF32, BF16F32Cast},
      {DType::kF64, DType::kF32, F64F32Cast},   {DType::kF32, DType::kF16, F32F16Cast},
      {DType::kBF16, DType::kF16, BF16F16Cast}, {DType::kF64, DType::kF16, F64F16Cast},
      {DType::kF32, DType::kBF16, F32BF16Cast}, {DType::kF16, DType::kBF16, F16BF16Cast},
      {DType::kF64, DType::kBF16, F64BF16Cast}};
  for (const Row& row : kRows) {
    if (row.from == from && row.to == to) return row.cast;
  }
  return nullptr;
}

}  // namespace

bool CanCast(DType from, DType to) { return from == to || FindCast(from, to) != nullptr; }

void CastElements(DType from, const std::byte* source, DType to, std::byte* destination,
                  size_t count) {
  if (from == to) {
    Copy(source, destination, count * static_cast<size_t>(DTypeBytes(from)));
  } else if (CastFunction cast = FindCast(from, to)) {
    cast(source, destination, count);
  }
}

}  // namespace dlo
