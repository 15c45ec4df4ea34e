#include "loader/cast.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <vector>

namespace dlo {
namespace {

// The 16-bit formats by their definition, in double arithmetic: slow and without bit tricks.
struct Format {
  DType dtype;
  int exponent_bits;
  int mantissa_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  uint16_t infinity() const {
    return static_cast<uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
  }
  double Decode(uint16_t bits) const {
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    const int exponent = (bits & 0x7FFF) >> mantissa_bits;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    if (exponent == (1 << exponent_bits) - 1) {
      return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                           : std::numeric_limits<double>::quiet_NaN();
    }
    const int scale = 1 - bias() - mantissa_bits;  // of a subnormal's last place
    if (exponent == 0) return sign * std::ldexp(mantissa, scale);
    return sign * std::ldexp(mantissa + (1 << mantissa_bits), scale + exponent - 1);
  }
  // Round to nearest even; not for NaN.
  uint16_t Encode(double value) const {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    if (std::isinf(magnitude)) return sign | infinity();
    const int smallest = 1 - bias();
    const int exponent = magnitude == 0 ? smallest : std::max(std::ilogb(magnitude), smallest);
    // A carry out of the mantissa, or out of the subnormals, lands on the right bits by itself.
    const double steps = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));
    const int64_t bits =
        (static_cast<int64_t>(exponent - smallest) << mantissa_bits) + static_cast<int64_t>(steps);
    return sign | static_cast<uint16_t>(std::min<int64_t>(bits, infinity()));
  }
};

constexpr Format kHalf = {DType::kF16, 5, 10};
constexpr Format kBrain = {DType::kBF16, 8, 7};

template <typename To, typename From>
std::vector<To> CastAll(DType from, const std::vector<From>& in, DType to) {
  std::vector<To> out(in.size());
  CastElements(from, reinterpret_cast<const std::byte*>(in.data()), to,
               reinterpret_cast<std::byte*>(out.data()), in.size());
  return out;
}

bool IsNan(const Format& format, uint16_t bits) { return (bits & 0x7FFF) > format.infinity(); }

// Every value of the format, every midpoint between neighbours (a tie), and the floats next to
// each; beyond the largest too.
std::vector<float> EveryRoundingCase(const Format& format) {
  std::vector<float> cases;
  auto add = [&cases](double value) {
    const float center = static_cast<float>(value);
    for (float x : {center, std::nextafterf(center, 0.0f),
                    std::nextafterf(center, std::numeric_limits<float>::infinity())}) {
      cases.push_back(x);
      cases.push_back(-x);
    }
  };
  for (uint16_t bits = 0; bits < format.infinity(); ++bits) {
    const double value = format.Decode(bits);
    const double next = bits + 1 == format.infinity()
                            ? 2 * value - format.Decode(static_cast<uint16_t>(bits - 1))
                            : format.Decode(static_cast<uint16_t>(bits + 1));
    add(value);
    add((value + next) / 2);
  }
  for (double value :
       {65535.0, 65536.0, 1e6, 1e30, 3.4028234663852886e38, 1.17549435e-38, 1e-40, 1e-45, 0.0}) {
    add(value);
  }
  return cases;
}

class CastTo16Bits : public ::testing::TestWithParam<Format> {};

TEST_P(CastTo16Bits, RoundsToNearestEvenEverywhere) {
  const Format format = GetParam();
  const std::vector<float> in = EveryRoundingCase(format);
  const std::vector<uint16_t> out = CastAll<uint16_t>(DType::kF32, in, format.dtype);
  for (size_t i = 0; i < in.size(); ++i) {
    ASSERT_EQ(out[i], format.Encode(in[i])) << "of " << in[i];
  }
}

TEST_P(CastTo16Bits, ExpandsEveryValueExactly) {
  const Format format = GetParam();
  std::vector<uint16_t> in(1 << 16);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i);
  const std::vector<float> out = CastAll<float>(format.dtype, in, DType::kF32);
  for (size_t i = 0; i < in.size(); ++i) {
    const double expected = format.Decode(in[i]);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(out[i])) << i;
    } else {
      ASSERT_EQ(out[i], expected) << i;
      ASSERT_EQ(std::signbit(out[i]), std::signbit(expected)) << i;
    }
  }
}

TEST_P(CastTo16Bits, NanStaysNan) {
  const Format format = GetParam();
  std::vector<float> in;
  // Payloads whose upper bits are clear would become infinity, and all-ones would carry, if they
  // were rounded as numbers.
  for (uint32_t bits : {0x7F800001u, 0x7F80FFFFu, 0x7F900000u, 0x7FC00000u, 0x7FFFFFFFu,
                        0xFF800001u, 0xFFFFFFFFu}) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    in.push_back(value);
  }
  for (uint16_t bits : CastAll<uint16_t>(DType::kF32, in, format.dtype)) {
    EXPECT_TRUE(IsNan(format, bits)) << std::hex << bits;
  }
  const std::vector<double> wide = {std::nan(""), -std::nan("1")};
  for (uint16_t bits : CastAll<uint16_t>(DType::kF64, wide, format.dtype)) {
    EXPECT_TRUE(IsNan(format, bits)) << std::hex << bits;
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, CastTo16Bits, ::testing::Values(kHalf, kBrain),
                         [](const auto& info) {
                           return info.param.dtype == DType::kF16 ? "F16" : "BF16";
                         });

TEST(CastTest, BetweenTheTwo16BitFormats) {
  std::vector<uint16_t> in(1 << 16);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i);
  for (auto [from, to] : {std::pair(kHalf, kBrain), std::pair(kBrain, kHalf)}) {
    const std::vector<uint16_t> out = CastAll<uint16_t>(from.dtype, in, to.dtype);
    for (size_t i = 0; i < in.size(); ++i) {
      const double value = from.Decode(in[i]);
      if (std::isnan(value)) {
        ASSERT_TRUE(IsNan(to, out[i])) << i;
      } else {
        ASSERT_EQ(out[i], to.Encode(value)) << i;
      }
    }
  }
}

TEST(CastTest, DoubleGoesThroughFloat) {
  // Just above the tie between 1 and 1 + 2^-10: F32 rounds it onto the tie, which then goes to
  // even.
  const std::vector<double> in = {
      1 + 0x1p-11 + 0x1p-40, 1e300, -1e300, 1e-300, -0.0, 1.0 / 3, 0x1p-149, 0x1.8p-150};
  const std::vector<float> floats = CastAll<float>(DType::kF64, in, DType::kF32);
  for (size_t i = 0; i < in.size(); ++i) {
    EXPECT_EQ(floats[i], static_cast<float>(in[i]));
    EXPECT_EQ(std::signbit(floats[i]), std::signbit(in[i]));
  }
  const std::vector<uint16_t> halves = CastAll<uint16_t>(DType::kF64, in, DType::kF16);
  EXPECT_EQ(halves[0], 0x3C00);
  EXPECT_EQ(halves[1], 0x7C00);
  EXPECT_EQ(halves[2], 0xFC00);
  EXPECT_EQ(halves[4], 0x8000);
}

TEST(CastTest, AnyAlignmentAndCount) {
  constexpr DType kFloats[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kF64};
  for (DType from : kFloats) {
    for (DType to : kFloats) {
      if (!CanCast(from, to)) continue;
      const size_t in_bytes = static_cast<size_t>(DTypeBytes(from));
      const size_t out_bytes = static_cast<size_t>(DTypeBytes(to));
      for (size_t count : {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 130}) {
        std::vector<std::byte> aligned(count * in_bytes), expected(count * out_bytes);
        for (size_t i = 0; i < aligned.size(); ++i) {
          aligned[i] = static_cast<std::byte>(i * 37 + 11);
        }
        for (size_t i = 0; i < count; ++i) {
          CastElements(from, aligned.data() + i * in_bytes, to, expected.data() + i * out_bytes, 1);
        }
        for (size_t shift : {0, 1, 2, 3, 5}) {
          std::vector<std::byte> in(shift + aligned.size());
          std::vector<std::byte> out(shift + expected.size() + 16, std::byte{0xA5});
          if (count > 0) std::memcpy(in.data() + shift, aligned.data(), aligned.size());
          CastElements(from, in.data() + shift, to, out.data() + shift, count);
          std::vector<std::byte> want(out.size(), std::byte{0xA5});
          if (count > 0) std::memcpy(want.data() + shift, expected.data(), expected.size());
          ASSERT_EQ(out, want) << DTypeName(from) << " to " << DTypeName(to) << ", " << count
                               << " elements, shift " << shift;
        }
      }
    }
  }
}

// From some size on memory is walked in another order.
TEST(CastTest, ManyElementsGiveWhatFewDo) {
  constexpr DType kFloats[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kF64};
  constexpr size_t kCount = (1 << 18) + 12345;
  for (DType from : kFloats) {
    for (DType to : kFloats) {
      if (!CanCast(from, to)) continue;
      const auto in_bytes = static_cast<size_t>(DTypeBytes(from));
      const auto out_bytes = static_cast<size_t>(DTypeBytes(to));
      std::vector<std::byte> in(kCount * in_bytes + 1), expected(kCount * out_bytes);
      uint32_t random = 7;
      for (std::byte& byte : in) {
        random = random * 1664525 + 1013904223;
        byte = static_cast<std::byte>(random >> 24);
      }
      for (size_t shift : {0, 1}) {
        for (size_t i = 0; i < kCount; i += 1000) {
          CastElements(from, in.data() + shift + i * in_bytes, to, expected.data() + i * out_bytes,
                       std::min<size_t>(1000, kCount - i));
        }
        for (size_t at : {0, 1, 16, 62}) {
          std::vector<std::byte> out(at + expected.size() + 64, std::byte{0xA5});
          CastElements(from, in.data() + shift, to, out.data() + at, kCount);
          ASSERT_EQ(std::memcmp(out.data() + at, expected.data(), expected.size()), 0)
              << DTypeName(from) << " to " << DTypeName(to) << ", shift " << at;
          ASSERT_EQ(out[at + expected.size()], std::byte{0xA5});
          ASSERT_TRUE(at == 0 || out[at - 1] == std::byte{0xA5});
        }
      }
    }
  }
}

TEST(CastTest, OnlyFloatsAreCastAndAnythingIsCopied) {
  EXPECT_TRUE(CanCast(DType::kI64, DType::kI64));
  EXPECT_TRUE(CanCast(DType::kF8E4M3, DType::kF8E4M3));
  EXPECT_TRUE(CanCast(DType::kF64, DType::kF64));
  EXPECT_TRUE(CanCast(DType::kF64, DType::kBF16));
  EXPECT_FALSE(CanCast(DType::kF32, DType::kF64));
  EXPECT_FALSE(CanCast(DType::kI64, DType::kF32));
  EXPECT_FALSE(CanCast(DType::kF8E4M3, DType::kF32));
  EXPECT_FALSE(CanCast(DType::kF32, DType::kI32));
  EXPECT_FALSE(CanCast(DType::kU8, DType::kBool));
  const std::vector<int64_t> in = {1, -2, INT64_MAX};
  EXPECT_EQ(CastAll<int64_t>(DType::kI64, in, DType::kI64), in);
}

}  // namespace
}  // namespace dlo
