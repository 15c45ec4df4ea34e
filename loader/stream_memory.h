// How much memory is walked through fast. Internal to loader/.
//
//   const auto use = [&](size_t at) __attribute__((always_inline)) {
//     UseUnit(source + at);   // 256 bytes
//   };
//   const size_t done = ForUnits<256>(source, bytes, use);
//   UseRest(source + done, bytes - done);
//
// A core's prefetchers follow each page by themselves and begin anew in the next, so one that reads
// several pages at once and asks for the next ones itself gets about twice as much from memory as
// one that reads them one after the other; and stores past the caches save reading what is about to
// be overwritten.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/clones.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace dlo {

inline constexpr size_t kStreams = 8;
inline constexpr size_t kStreamBytes = 4096;

inline constexpr size_t kLineBytes = 64;

// Calls use(offset) for each unit of kUnit bytes, a divisor of kStreamBytes, in [0, R), R being the
// largest multiple of kStreams * kStreamBytes in `bytes`; returns R. `source` is what the units are
// read from.
template <size_t kUnit, typename Use>
DLO_INLINE size_t ForUnits(const std::byte* source, size_t bytes, Use use) {
  static_assert(kStreamBytes % kUnit == 0);
  constexpr size_t kGroup = kStreams * kStreamBytes;
  const size_t end = bytes - bytes % kGroup;
  for (size_t group = 0; group < end; group += kGroup) {
    for (size_t unit = 0; unit < kStreamBytes; unit += kUnit) {
      for (size_t stream = 0; stream < kStreams; ++stream) {
        const size_t at = group + stream * kStreamBytes + unit;
        // Past the end it does nothing.
        for (size_t line = 0; line < kUnit; line += kLineBytes) {
          __builtin_prefetch(source + at + kGroup + line);
        }
        use(at);
      }
    }
  }
  return end;
}

// A unit's result on its way to `to`, aligned to 16 bytes, past the caches where that is possible.
template <size_t kBytes>
struct alignas(64) StreamedUnit {
  std::byte bytes[kBytes];

  DLO_INLINE void Store(std::byte* to) const {
    static_assert(kBytes % 16 == 0);
#ifdef __SSE2__
    for (size_t i = 0; i < kBytes; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm_load_si128(reinterpret_cast<const __m128i*>(bytes + i)));
    }
#else
    __builtin_memcpy(to, bytes, kBytes);
#endif
  }
};

// After the last Store, before another thread is told of them.
DLO_INLINE void EndStores() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace dlo
