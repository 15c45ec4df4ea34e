// A float32 as its bits and back, inlined into loops that become vector code.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/clones.h"

namespace dlo {

DLO_INLINE uint32_t Bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

DLO_INLINE float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace dlo
