// Element casts between checkpoint dtypes and run dtypes.
//
//   if (CanCast(DType::kF32, DType::kBF16)) {
//     CastElements(DType::kF32, source, DType::kBF16, destination, count);
//   }
//
// Between F32, F16 and BF16, and from F64 to these: round to nearest even, subnormals kept,
// overflow to infinity, NaN stays NaN. As in torch, every cast to 16 bits goes through F32 (so F64
// to F16 rounds twice). Any dtype is copied to itself.
//
// Pointers need no alignment; ranges must not overlap. Stateless, any thread.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace dlo {

bool CanCast(DType from, DType to);

// CanCast(from, to) must hold; otherwise nothing happens.
void CastElements(DType from, const std::byte* source, DType to, std::byte* destination,
                  size_t count);

}  // namespace dlo
