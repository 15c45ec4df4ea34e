#include "models/wan/vae_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/clones.h"

namespace dlo {
namespace {

// N lanes, written with the compilers' vector extension: loops over so few channels are not
// vectorised well otherwise.
template <int N>
struct Lanes {
  typedef float Float __attribute__((vector_size(4 * N)));
  typedef int32_t Int __attribute__((vector_size(4 * N)));
};

template <typename To, typename From>
DLO_INLINE To Bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <int N>
DLO_INLINE typename Lanes<N>::Float Load(const float* from) {
  typename Lanes<N>::Float v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

// e^x for x in [-87, 87]: x = n ln 2 + r with |r| <= ln 2 / 2, e^x = 2^n e^r, e^r by its Taylor
// polynomial of degree 7 (whose error is below a float's rounding).
template <int N>
DLO_INLINE typename Lanes<N>::Float Exp(typename Lanes<N>::Float x) {
  using Int = typename Lanes<N>::Int;
  using Float = typename Lanes<N>::Float;
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693145751953125f;  // 16 bits, so n * kLn2High is exact
  constexpr float kLn2Low = 1.42860677e-6f;
  constexpr float kRound =
      12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Float shifted = x * kLog2E + kRound;
  const Float n = shifted - kRound;
  const Float r = (x - n * kLn2High) - n * kLn2Low;
  Float p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * Bits<Float>((Bits<Int>(shifted) << 23) + (127 << 23));
}

// v / (1 + e^-v), the exponent's magnitude limited to 87. Magnitudes are compared as integers,
// which orders them alike and takes a NaN for large; it survives in the numerator.
template <int N>
DLO_INLINE typename Lanes<N>::Float Silu(typename Lanes<N>::Float v) {
  using Int = typename Lanes<N>::Int;
  using Float = typename Lanes<N>::Float;
  const Int bits = Bits<Int>(v);
  const Int magnitude = bits & 0x7fffffff;
  const Int limit = Int{} + Bits<int32_t>(87.0f);
  const Int limited = magnitude < limit ? magnitude : limit;
  const Int sign = ~bits & static_cast<int32_t>(0x80000000);
  return v / (1.0f + Exp<N>(Bits<Float>(limited | sign)));
}

template <int N>
DLO_INLINE float Sum(const typename Lanes<N>::Float& v) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    typename Lanes<N / 2>::Float half[2];
    std::memcpy(half, &v, sizeof(v));
    return Sum<N / 2>(half[0] + half[1]);
  }
}

// Each of these handles what is left of a row from channel i on, in steps of N lanes and then of
// fewer.
template <int N>
DLO_INLINE float SumOfSquares(const float* x, int64_t i, int64_t channels) {
  typename Lanes<N>::Float sum = {};
  for (; i + N <= channels; i += N) {
    const auto v = Load<N>(x + i);
    sum += v * v;
  }
  if constexpr (N > 1) {
    if (i < channels) return Sum<N>(sum) + SumOfSquares<N / 2>(x, i, channels);
  }
  return Sum<N>(sum);
}

template <int N, bool kSilu>
DLO_INLINE void Scale(const float* x, float by, const float* gain, int64_t i, int64_t channels,
                      float* y) {
  for (; i + N <= channels; i += N) {
    auto v = Load<N>(x + i) * by * Load<N>(gain + i);
    if constexpr (kSilu) v = Silu<N>(v);
    std::memcpy(y + i, &v, sizeof(v));
  }
  if constexpr (N > 1) {
    if (i < channels) Scale<N / 2, kSilu>(x, by, gain, i, channels, y);
  }
}

template <bool kSilu>
DLO_INLINE void Rows(const float* x, const float* gain, int64_t rows, int64_t channels, float* y) {
  for (int64_t row = 0; row < rows; ++row, x += channels, y += channels) {
    const float norm = std::sqrt(SumOfSquares<16>(x, 0, channels));
    Scale<16, kSilu>(x, 1.0f / std::max(norm, 1e-12f), gain, 0, channels, y);
  }
}

}  // namespace

DLO_CLONES void NormRows(const float* x, const float* gain, int64_t rows, int64_t channels,
                         bool silu, float* y) {
  if (silu) {
    Rows<true>(x, gain, rows, channels, y);
  } else {
    Rows<false>(x, gain, rows, channels, y);
  }
}

}  // namespace dlo
