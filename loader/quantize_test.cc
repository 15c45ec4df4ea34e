#include "loader/quantize.h"

#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "loader/cast.h"

namespace dlo {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The format by its definition.
double Decode(int bits) {
  const double sign = (bits & 0x80) != 0 ? -1 : 1;
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 0x7F) == 0x7F) return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(mantissa, -9);
  return sign * std::ldexp(8 + mantissa, exponent - 10);
}

// The nearest of all 127 magnitudes, of two equally near ones the even one.
uint8_t Encode(double value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const double magnitude = std::fabs(value);
  int best = 0;
  for (int bits = 1; bits <= 0x7E; ++bits) {
    const double error = std::fabs(Decode(bits) - magnitude);
    const double best_error = std::fabs(Decode(best) - magnitude);
    if (error < best_error || (error == best_error && bits % 2 == 0)) best = bits;
  }
  return sign | static_cast<uint8_t>(magnitude > 448 ? 0x7E : best);
}

template <typename T>
const std::byte* Bytes(const std::vector<T>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

template <typename T>
std::vector<uint8_t> Quantize(DType from, const std::vector<T>& values, float scale) {
  std::vector<uint8_t> out(values.size());
  QuantizeE4M3(from, Bytes(values), scale, reinterpret_cast<std::byte*>(out.data()), out.size());
  return out;
}

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Every value, every midpoint (a tie) and the floats next to each; beyond the largest, too.
std::vector<float> EveryRoundingCase() {
  std::vector<float> cases;
  const auto add = [&](double value) {
    const auto center = static_cast<float>(value);
    for (float x : {center, std::nextafterf(center, 0), std::nextafterf(center, kInfinity)}) {
      cases.push_back(x);
      cases.push_back(-x);
    }
  };
  for (int bits = 0; bits < 0x7E; ++bits) {
    add(Decode(bits));
    add((Decode(bits) + Decode(bits + 1)) / 2);
  }
  for (double value : {448.0, 464.0, 480.0, 512.0, 1e6, 1e30, 3.4028234663852886e38, 1.17549435e-38,
                       1e-40, 1e-45}) {
    add(value);
  }
  return cases;
}

TEST(QuantizeE4M3Test, RoundsToNearestEvenEverywhereAndSaturates) {
  const std::vector<float> in = EveryRoundingCase();
  const std::vector<uint8_t> out = Quantize(DType::kF32, in, 1);
  for (size_t i = 0; i < in.size(); ++i) ASSERT_EQ(out[i], Encode(in[i])) << "of " << in[i];
  EXPECT_EQ(Quantize(DType::kF32, std::vector<float>{kInfinity, -kInfinity}, 1),
            (std::vector<uint8_t>{0x7E, 0xFE}));
}

TEST(QuantizeE4M3Test, DividesByTheScaleInFloat32) {
  std::vector<float> in;
  uint32_t random = 1;
  for (int i = 0; i < 100000; ++i) {
    random = random * 1664525 + 1013904223;
    in.push_back(static_cast<float>(static_cast<int32_t>(random)) * 0x1p-31f);
  }
  for (float scale : {1.0f / 448, 0.00213f, 3e-5f, 7.0f}) {
    const std::vector<uint8_t> out = Quantize(DType::kF32, in, scale);
    for (size_t i = 0; i < in.size(); ++i) {
      ASSERT_EQ(out[i], Encode(in[i] / scale)) << in[i] << " over " << scale;
    }
  }
}

TEST(QuantizeE4M3Test, AnyDTypeCountAndAlignmentGivesWhatFloat32Does) {
  // Beyond the sizes at which memory is walked in another order.
  const std::vector<size_t> counts = {0, 1, 7, 63, 64, 65, 2047, 2049, 100001};
  for (DType from : {DType::kF32, DType::kF16, DType::kBF16, DType::kF64}) {
    ASSERT_TRUE(CanQuantize(from));
    const auto bytes = static_cast<size_t>(DTypeBytes(from));
    for (size_t count : counts) {
      std::vector<float> floats(count);
      for (size_t i = 0; i < count; ++i) {
        floats[i] = static_cast<float>(static_cast<int>(i * 37 % 1013) - 500) * 0.125f;
      }
      for (size_t shift : {0, 1, 5}) {
        std::vector<std::byte> in(shift + count * bytes), out(shift + count + 16, std::byte{0xA5});
        if (from == DType::kF64) {
          for (size_t i = 0; i < count; ++i) {
            const double value = floats[i];
            std::memcpy(in.data() + shift + i * 8, &value, 8);
          }
        } else {
          CastElements(DType::kF32, Bytes(floats), from, in.data() + shift, count);
        }
        std::vector<float> seen(count);
        CastElements(from, in.data() + shift, DType::kF32,
                     reinterpret_cast<std::byte*>(seen.data()), count);
        QuantizeE4M3(from, in.data() + shift, 0.3f, out.data() + shift, count);
        float largest = 0;
        for (size_t i = 0; i < count; ++i) {
          ASSERT_EQ(static_cast<int>(out[shift + i]), Encode(seen[i] / 0.3f));
          largest = std::max(largest, std::fabs(seen[i]));
        }
        ASSERT_EQ(out[shift + count], std::byte{0xA5});
        ASSERT_EQ(FromBits(MaxMagnitudeBits(from, in.data() + shift, count)), largest)
            << DTypeName(from) << ", " << count << " elements";
      }
    }
  }
  EXPECT_FALSE(CanQuantize(DType::kF8E4M3));
  EXPECT_FALSE(CanQuantize(DType::kI32));
}

TEST(QuantizeE4M3Test, TheScaleMapsTheLargestMagnitudeTo448) {
  const auto scale = [](float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return E4M3Scale(bits);
  };
  EXPECT_EQ(scale(448), 1);
  EXPECT_EQ(scale(3.5f), 3.5f / 448);
  EXPECT_EQ(scale(0), 1);
  EXPECT_EQ(scale(FLT_MIN), FLT_MIN);
  EXPECT_EQ(scale(1e-45f), FLT_MIN);
  for (float largest : {1.0f, 0.37f, 1e30f, 1e-30f}) {
    EXPECT_EQ(Quantize(DType::kF32, std::vector<float>{largest, -largest}, scale(largest)),
              (std::vector<uint8_t>{0x7E, 0xFE}));
  }
}

// Wherever it stands, and with any sign.
TEST(QuantizeE4M3Test, WhatIsNotFiniteIsSeen) {
  for (size_t at : {size_t{0}, size_t{5}, size_t{40000}, size_t{99999}}) {
    for (float bad : {kInfinity, -kInfinity, std::nanf(""), -std::nanf("7")}) {
      std::vector<float> floats(100000, FLT_MAX);
      EXPECT_TRUE(IsFiniteMagnitude(MaxMagnitudeBits(DType::kF32, Bytes(floats), floats.size())));
      floats[at] = bad;
      EXPECT_FALSE(IsFiniteMagnitude(MaxMagnitudeBits(DType::kF32, Bytes(floats), floats.size())));
      for (DType dtype : {DType::kF16, DType::kBF16}) {
        std::vector<uint16_t> halves(floats.size(), 0x0101);
        CastElements(DType::kF32, Bytes(floats) + at * 4, dtype,
                     reinterpret_cast<std::byte*>(&halves[at]), 1);
        EXPECT_FALSE(IsFiniteMagnitude(MaxMagnitudeBits(dtype, Bytes(halves), halves.size())));
      }
    }
  }
}

TEST(DequantizeE4M3Test, EveryValueTimesTheScaleRoundedOnce) {
  std::vector<uint8_t> all(256 * 3);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint8_t>(i);
  for (float scale : {1.0f, 0.0021338f, 1.7e-5f, 3.0f}) {
    std::vector<float> floats(all.size()), expected(all.size());
    std::vector<uint16_t> halves(all.size()), expected_halves(all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      expected[i] = static_cast<float>(Decode(all[i])) * scale;
    }
    CastElements(DType::kF32, Bytes(expected), DType::kBF16,
                 reinterpret_cast<std::byte*>(expected_halves.data()), all.size());
    DequantizeE4M3(Bytes(all), scale, DType::kF32, reinterpret_cast<std::byte*>(floats.data()),
                   all.size());
    DequantizeE4M3(Bytes(all), scale, DType::kBF16, reinterpret_cast<std::byte*>(halves.data()),
                   all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      if (std::isnan(expected[i])) {
        ASSERT_TRUE(std::isnan(floats[i]));
        ASSERT_EQ(halves[i] & 0x7FFF, 0x7FC0);
      } else {
        ASSERT_EQ(floats[i], expected[i]) << i;
        ASSERT_EQ(std::signbit(floats[i]), (all[i] & 0x80) != 0) << i;
        ASSERT_EQ(halves[i], expected_halves[i]) << i;
      }
    }
  }
}

}  // namespace
}  // namespace dlo
