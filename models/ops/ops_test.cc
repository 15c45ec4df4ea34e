// Each fused kernel against the ATen calls it replaces.
#include "models/ops/ops.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "gtest/gtest.h"
#include "loader/quantize.h"

namespace dlo {
namespace {

double MaxError(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

class Ops : public testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override { at::manual_seed(1); }
  at::Tensor Random(at::IntArrayRef shape) { return at::randn(shape).to(GetParam()); }
  // One rounding of values up to about 4.
  double tolerance() const { return GetParam() == at::kFloat ? 2e-6 : 2e-2; }
};

TEST_P(Ops, LinearIsXWTransposedPlusBias) {
  const at::Tensor x = Random({2, 5, 24}), w = Random({40, 24}) / 5, b = Random({40});
  const at::Tensor expected = at::linear(x.to(at::kDouble), w.to(at::kDouble), b.to(at::kDouble));
  EXPECT_LT(MaxError(Linear(x, w, b), expected), tolerance());
  EXPECT_LT(MaxError(Linear(x, w, b, Activation::kGeluTanh), at::gelu(expected, "tanh")),
            tolerance());
}

// A weight in float8_e4m3fn with its scale, and what it stands for in the run dtype.
struct Quantised {
  LinearWeights weights;
  at::Tensor meant;
};

Quantised Quantise(const at::Tensor& weight, const at::Tensor& bias, at::ScalarType run) {
  const at::Tensor w = weight.to(at::kFloat);
  const at::Tensor scale = w.abs().max().reshape({1}) / 448;
  const at::Tensor q = (w / scale).clamp(-448, 448).to(at::kFloat8_e4m3fn);
  return {{q, scale, bias}, (q.to(at::kFloat) * scale).to(run)};
}

TEST_P(Ops, LinearOfAScaledWeightIsThatOfWhatItStandsFor) {
  at::Tensor scratch;
  for (const auto& [in, out] : {std::pair(48, 40), std::pair(24, 16), std::pair(640, 512)}) {
    const at::Tensor x = Random({2, 5, in});
    const Quantised w = Quantise(Random({out, in}) / 5, Random({out}), GetParam());
    for (const Activation activation : {Activation::kNone, Activation::kGeluTanh}) {
      EXPECT_TRUE(at::equal(Linear(x, w.weights, scratch, activation),
                            Linear(x, w.meant, w.weights.bias, activation)));
    }
  }
  // It has room for the largest, and a layer without a scale needs none.
  EXPECT_EQ(scratch.numel(), 640 * 512);
  const at::Tensor x = Random({1, 3, 24}), w = Random({40, 24}), b = Random({40});
  at::Tensor none;
  EXPECT_TRUE(at::equal(Linear(x, LinearWeights{w, {}, b}, none), Linear(x, w, b)));
  EXPECT_FALSE(none.defined());
}

TEST_P(Ops, EachRowIsQuantisedByItself) {
  const at::Tensor sizes = at::tensor({1e-3, 1.0, 5.0, 1e3, 0.0}).view({1, 5, 1});
  const at::Tensor x = (Random({2, 5, 64}) * sizes).to(GetParam());
  const QuantizedRows rows = QuantizeRows(x);
  EXPECT_EQ(rows.values.sizes(), at::IntArrayRef({10, 64}));
  EXPECT_EQ(rows.values.scalar_type(), at::kFloat8_e4m3fn);
  EXPECT_EQ(rows.scales.sizes(), at::IntArrayRef({10, 1}));
  const at::Tensor back = (rows.values.to(at::kFloat) * rows.scales).view({2, 5, 64});
  const at::Tensor largest = x.to(at::kFloat).abs().amax(-1, true);
  // Half of a step: 2^-4 of the value, or of the smallest normal one where that is more.
  const at::Tensor bound = (x.to(at::kFloat).abs() / 16).maximum(largest / 448 / 1024) * 1.001;
  EXPECT_TRUE(((back - x.to(at::kFloat)).abs() <= bound).all().item<bool>());
  EXPECT_LT(
      MaxError(back.abs().amax(-1, true) / largest.clamp_min(1e-30), (largest > 0).to(at::kFloat)),
      1e-6);
}

TEST_P(Ops, ScaledLayerNormMatchesLayerNormForSharedAndPerTokenModulation) {
  for (int64_t channels : {24, 37, 192}) {
    const at::Tensor x = Random({2, 7, channels}) + 3;
    for (int64_t rows : {1, 7}) {
      const at::Tensor scale = at::randn({rows, channels}), shift = at::randn({rows, channels});
      const at::Tensor expected =
          at::layer_norm(x.to(at::kDouble), {channels}, {}, {}, 1e-6) * scale + shift;
      const at::Tensor y = ScaledLayerNorm(x, scale, shift, 1e-6);
      EXPECT_EQ(y.scalar_type(), GetParam());
      EXPECT_LT(MaxError(y, expected), 4 * tolerance())
          << channels << " channels, " << rows << " rows";
    }
  }
}

TEST_P(Ops, GatedAddBroadcastsTheSharedResidual) {
  const at::Tensor y = Random({2, 7, 33}), gate = at::randn({1, 33});
  for (int64_t groups : {1, 2}) {
    const at::Tensor x = Random({groups, 7, 33});
    const at::Tensor expected = x.to(at::kDouble) + y.to(at::kDouble) * gate;
    EXPECT_LT(MaxError(GatedAdd(x, y, gate), expected), 2 * tolerance());
  }
}

TEST_P(Ops, RmsNormRotaryNormalisesOverAllHeadsThenRotatesPairs) {
  const int64_t head_dim = 12, heads = 3, tokens = 5;
  const at::Tensor x = Random({2, tokens, heads * head_dim}), w = Random({heads * head_dim});
  const at::Tensor normed =
      at::rms_norm(x.to(at::kFloat), {heads * head_dim}, w.to(at::kFloat), 1e-6).to(GetParam());
  EXPECT_LT(MaxError(RmsNormRotary(x, w, 1e-6, head_dim, std::nullopt), normed), 2 * tolerance());

  const at::Tensor angle = at::randn({tokens, head_dim / 2});
  const Rotary rotary = {angle.cos(), angle.sin()};
  // A rotation is a complex multiplication.
  const at::Tensor pairs =
      at::view_as_complex(normed.to(at::kFloat).view({2, tokens, heads, head_dim / 2, 2}));
  const at::Tensor expected =
      at::view_as_real(pairs * at::complex(rotary.cos, rotary.sin).unsqueeze(1))
          .reshape({2, tokens, heads * head_dim});
  EXPECT_LT(MaxError(RmsNormRotary(x, w, 1e-6, head_dim, rotary), expected), 2 * tolerance());
}

TEST_P(Ops, AttentionWithAKeyBiasEqualsRepeatingTheKey) {
  const int64_t heads = 2, width = 24;
  const at::Tensor q = Random({1, 9, width}), k = Random({1, 4, width}), v = Random({1, 4, width});
  // The last key stands for 6 equal ones.
  const at::Tensor bias = at::zeros({4});
  bias[3] = std::log(6.0);
  const auto repeat = [](const at::Tensor& x) {
    return at::cat({x, x.slice(1, 3, 4).expand({1, 5, x.size(2)})}, 1);
  };
  const at::Tensor expected =
      Attention(q.to(at::kFloat), repeat(k).to(at::kFloat), repeat(v).to(at::kFloat), heads);
  EXPECT_LT(MaxError(Attention(q, k, v, heads, bias), expected), tolerance());
}

TEST_P(Ops, MismatchedShapesThrow) {
  const at::Tensor x = Random({1, 4, 8});
  EXPECT_THROW(ScaledLayerNorm(x, at::zeros({3, 8}), at::zeros({1, 8}), 1e-6), c10::Error);
  EXPECT_THROW(GatedAdd(x, Random({2, 4, 8}), at::zeros({1, 9})), c10::Error);
  EXPECT_THROW(RmsNormRotary(x, Random({8}), 1e-6, 4, Rotary{at::zeros({3, 2}), at::zeros({3, 2})}),
               c10::Error);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Ops, testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) { return c10::toString(info.param); });

// Every bfloat16 there is, and float32s of all sizes.
TEST(E4M3, ConversionsAreTorchs) {
  at::manual_seed(2);
  const at::Tensor all = at::arange(1 << 16, at::kInt).to(at::kShort).view(at::kBFloat16);
  const at::Tensor random = at::randn({1 << 16}) * at::pow(2.0, at::randint(-14, 11, {1 << 16}));
  for (const at::Tensor& x : {all, random, random.to(at::kHalf)}) {
    const DType dtype = x.scalar_type() == at::kFloat  ? DType::kF32
                        : x.scalar_type() == at::kHalf ? DType::kF16
                                                       : DType::kBF16;
    for (float scale : {1.0f, 0.37f}) {
      const at::Tensor expected =
          (x.to(at::kFloat) / scale).clamp(-448, 448).to(at::kFloat8_e4m3fn);
      at::Tensor q = at::empty_like(expected);
      QuantizeE4M3(dtype, static_cast<const std::byte*>(x.const_data_ptr()), scale,
                   static_cast<std::byte*>(q.mutable_data_ptr()), q.numel());
      EXPECT_TRUE(at::equal(q.view(at::kByte), expected.view(at::kByte)));
      for (const auto& [to, run] :
           {std::pair(at::kFloat, DType::kF32), std::pair(at::kBFloat16, DType::kBF16)}) {
        at::Tensor back = at::empty(q.sizes(), to);
        DequantizeE4M3(static_cast<const std::byte*>(q.const_data_ptr()), scale, run,
                       static_cast<std::byte*>(back.mutable_data_ptr()), q.numel());
        EXPECT_TRUE(at::allclose(back, (expected.to(at::kFloat) * scale).to(to), 0, 0,
                                 /*equal_nan=*/true));
      }
    }
  }
}

}  // namespace
}  // namespace dlo
