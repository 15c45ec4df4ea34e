// Parity of the autoencoder with diffusers: the formula fixtures of
// ../shared/reference/models.md, 9.1 b (expected values were computed with diffusers' own classes),
// goldens written by tools/make_vae_goldens.py, and the demo model. Parameter counts are those of
// section 1.
#include "models/wan/vae.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/safetensors.h"
#include "models/wan/vae_kernels.h"
#include "models/wan/vae_layers.h"
#include "models/wan/vae_specs.h"
#include "tests/support/hash_weights.h"

namespace dlo {
namespace {

using ::testing::ElementsAre;

// Tiny tensors gain nothing from threads, and on a busy machine lose much.
const bool one_thread = (at::set_num_threads(1), true);

at::Tensor Own(const std::vector<float>& values, at::IntArrayRef shape) {
  return at::tensor(at::ArrayRef<float>(values), at::kFloat).view(shape);
}

at::Tensor Input(const std::string& name, at::IntArrayRef shape) {
  return Own(HashInput(name, c10::multiply_integers(shape)), shape);
}

HashSummary Summary(const at::Tensor& tensor) {
  const at::Tensor t = tensor.to(at::kFloat).contiguous();
  return Summarize(absl::MakeConstSpan(t.const_data_ptr<float>(), t.numel()));
}

// A source of formula weights for exactly the tensors of the specs.
VaeWeightSource HashWeights(const WanVaeConfig& config, at::ScalarType dtype = at::kFloat) {
  auto specs = std::make_shared<std::map<std::string, std::vector<int64_t>>>();
  for (const TensorSpec& spec : WanVaeSpecs(config, /*encoder=*/true)) {
    specs->emplace(spec.name, spec.shape);
  }
  return [specs, dtype](const std::string& name) {
    const std::vector<int64_t>& shape = specs->at(name);
    return Own(HashWeight(name, shape), shape).to(dtype);
  };
}

// All frames of a decode in diffusers' layout and range: [1, 3, F, H, W] in -1..1.
at::Tensor DecodeAll(const WanVae& vae, const at::Tensor& z) {
  std::vector<at::Tensor> chunks;
  EXPECT_TRUE(vae.Decode(z, [&](const at::Tensor& frames) {
    chunks.push_back(frames.clone());
    return true;
  }));
  return (at::cat(chunks) * 2 - 1).permute({3, 0, 1, 2}).unsqueeze(0);
}

WanVaeConfig Tiny21() { return {.base_dim = 3, .dim_mult = {1, 1, 1, 1}, .num_res_blocks = 1}; }

WanVaeConfig Small21() { return {.base_dim = 4}; }

WanVaeConfig Tiny22() {
  return {.base_dim = 3,
          .z_dim = 48,
          .dim_mult = {1, 1, 1, 1},
          .num_res_blocks = 1,
          .is_residual = true,
          .in_channels = 12,
          .out_channels = 12,
          .patch_size = 2,
          .scale_factor_spatial = 16};
}

WanVaeConfig Small22() {
  WanVaeConfig config = Tiny22();
  config.base_dim = 4;
  config.decoder_base_dim = 4;
  config.dim_mult = {1, 2, 4, 4};
  config.num_res_blocks = 2;
  return config;
}

WanVaeConfig Full22() {
  WanVaeConfig config = Small22();
  config.base_dim = 160;
  config.decoder_base_dim = 256;
  return config;
}

int64_t NumParameters(const std::vector<TensorSpec>& specs) {
  int64_t sum = 0;
  for (const TensorSpec& spec : specs) sum += spec.num_elements();
  return sum;
}

TEST(WanVaeSpecs, FullSizeModelsHaveThePublishedTensorsAndParameters) {
  const std::vector<TensorSpec> wan21 = WanVaeSpecs(WanVaeConfig(), true);
  EXPECT_EQ(wan21.size(), 194u);
  EXPECT_EQ(NumParameters(wan21), 126'892'531);
  EXPECT_EQ(WanVaeSpecs(WanVaeConfig(), false).size(), 108u);
  EXPECT_EQ(NumParameters(WanVaeSpecs(WanVaeConfig(), false)), 73'295'331 + 16 * 16 + 16);

  const std::vector<TensorSpec> wan22 = WanVaeSpecs(Full22(), true);
  EXPECT_EQ(wan22.size(), 196u);
  EXPECT_EQ(NumParameters(wan22), 704'688'668);
}

TEST(WanVaeSpecs, TheNetworkReadsExactlyTheTensorsOfTheSpecs) {
  for (const WanVaeConfig& config : {Tiny21(), Small21(), Tiny22(), Small22()}) {
    for (const bool encoder : {false, true}) {
      std::set<std::string> want, read;
      for (const TensorSpec& spec : WanVaeSpecs(config, encoder)) want.insert(spec.name);
      const VaeWeightSource weights = HashWeights(config);
      const WanVae vae(config,
                       [&](const std::string& name) {
                         EXPECT_TRUE(read.insert(name).second) << name << " was read twice";
                         return weights(name);
                       },
                       {.encoder = encoder});
      EXPECT_EQ(read, want);
    }
  }
}

struct FixtureCase {
  std::string name;
  WanVaeConfig config;
  bool encode = false;
  std::vector<int64_t> input;
  std::optional<WanVaeTiling> tiling;
  std::vector<int64_t> output;
  HashSummary want;
  // All channels cancel to 1e-8 before one norm, so float32 is rounding noise around there:
  // diffusers' own differs by 0.15 from its float64 result in one value, which the published
  // numbers have.
  bool ill_conditioned = false;
};

class WanVaeFixture : public ::testing::TestWithParam<FixtureCase> {
 protected:
  void Check(at::ScalarType dtype, double tolerance) {
    const FixtureCase& c = GetParam();
    const WanVae vae(c.config, HashWeights(c.config, dtype),
                     {.encoder = c.encode, .tiling = c.tiling});
    const at::Tensor in = Input(c.encode ? "input.pixels" : "input.latents", c.input).to(dtype);
    const at::Tensor out = c.encode ? vae.Encode(in) : DecodeAll(vae, in);
    EXPECT_EQ(out.scalar_type(), dtype);
    EXPECT_EQ(out.sizes(), at::IntArrayRef(c.output));
    const HashSummary got = Summary(out);
    EXPECT_NEAR(got.sum, c.want.sum, tolerance * std::abs(c.want.sum));
    EXPECT_NEAR(got.l2, c.want.l2, tolerance * c.want.l2);
    for (size_t i = 0; i < got.values.size(); ++i) {
      EXPECT_NEAR(got.values[i], c.want.values[i], 1e-4) << "value " << i;
    }
  }
};

TEST_P(WanVaeFixture, MatchesThePublishedNumbers) {
  Check(at::kFloat, GetParam().ill_conditioned ? 1e-3 : 1e-4);
}

// The way without CPU kernels, which other devices take.
TEST_P(WanVaeFixture, MatchesThePublishedNumbersThroughAtenInFloat64) { Check(at::kDouble, 1e-4); }

INSTANTIATE_TEST_SUITE_P(
    Models, WanVaeFixture,
    ::testing::Values(FixtureCase{.name = "Tiny21Decode",
                                  .config = Tiny21(),
                                  .input = {1, 16, 3, 2, 2},
                                  .output = {1, 3, 9, 16, 16},
                                  .want = {-208.152383,
                                           23.823820,
                                           {0.224984, 0.248456, 0.169681, 0.359086, 0.206521,
                                            0.432704, -0.295216, -0.088785}}},
                      FixtureCase{.name = "Tiny21Encode",
                                  .config = Tiny21(),
                                  .encode = true,
                                  .input = {1, 3, 9, 16, 16},
                                  .output = {1, 16, 3, 2, 2},
                                  .want = {-0.756542,
                                           1.724728,
                                           {0.152062, 0.091976, 0.101971, 0.102010, -0.006466,
                                            0.168937, -0.088746, -0.105685}}},
                      FixtureCase{.name = "Tiny21DecodeTiled",
                                  .config = Tiny21(),
                                  .input = {1, 16, 2, 6, 7},
                                  .tiling = WanVaeTiling{32, 32, 24, 24},
                                  .output = {1, 3, 5, 48, 56},
                                  .want = {-753.238409,
                                           44.519538,
                                           {0.231174, 0.242189, 0.115801, 0.318704, 0.215495,
                                            -0.280059, -0.306229, -0.009847}}},
                      FixtureCase{.name = "Tiny21DecodeTiledSizeUntiled",
                                  .config = Tiny21(),
                                  .input = {1, 16, 2, 6, 7},
                                  .output = {1, 3, 5, 48, 56},
                                  .want = {-626.934564,
                                           44.024923,
                                           {0.218145, 0.271029, 0.364984, 0.348907, 0.203537,
                                            -0.147609, -0.319734, -0.116682}},
                                  .ill_conditioned = true},
                      FixtureCase{.name = "Small21Decode",
                                  .config = Small21(),
                                  .input = {1, 16, 2, 3, 2},
                                  .output = {1, 3, 5, 24, 16},
                                  .want = {207.079436,
                                           17.822828,
                                           {0.308175, 0.162191, 0.095893, 0.105949, -0.008783,
                                            0.158158, -0.291319, -0.023258}}},
                      FixtureCase{.name = "Tiny22Decode",
                                  .config = Tiny22(),
                                  .input = {1, 48, 3, 2, 2},
                                  .output = {1, 3, 9, 32, 32},
                                  .want = {-557.527741,
                                           43.369929,
                                           {0.050613, -0.200027, 0.002432, -0.192877, -0.047921,
                                            -0.165675, -0.001477, 0.004145}}},
                      FixtureCase{.name = "Tiny22Encode",
                                  .config = Tiny22(),
                                  .encode = true,
                                  .input = {1, 3, 9, 32, 32},
                                  .output = {1, 48, 3, 2, 2},
                                  .want = {-7.448162,
                                           2.822180,
                                           {0.049160, 0.073378, 0.095119, 0.089291, 0.022821,
                                            -0.053754, -0.097690, -0.216911}}},
                      FixtureCase{.name = "Small22Decode",
                                  .config = Small22(),
                                  .input = {1, 48, 2, 2, 3},
                                  .output = {1, 3, 5, 32, 48},
                                  .want = {-576.387866,
                                           41.099346,
                                           {0.190649, -0.264169, -0.021476, -0.241586, -0.138578,
                                            -0.050155, 0.019480, -0.326962}}}),
    [](const auto& info) { return info.param.name; });

// ---- goldens ----

std::filesystem::path Source(const std::string& path) {
  return std::filesystem::path(DLO_SOURCE_DIR) / path;
}

// The float32 tensors of a safetensors file.
std::map<std::string, at::Tensor> ReadTensors(const std::filesystem::path& path) {
  std::map<std::string, at::Tensor> tensors;
  const auto file = SafetensorsFile::Open(path);
  if (!file.ok()) {
    ADD_FAILURE() << file.status();
    return tensors;
  }
  for (const auto& [name, entry] : file->tensors()) {
    if (entry.dtype != DType::kF32) continue;
    const at::Tensor tensor = at::empty(entry.shape, at::kFloat);
    std::memcpy(tensor.mutable_data_ptr<float>(), file->data(entry).data(), entry.bytes);
    tensors.emplace(name, tensor);
  }
  return tensors;
}

void ExpectClose(const at::Tensor& got, const at::Tensor& want, double tolerance,
                 const std::string& what) {
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  EXPECT_LE((got - want).abs().max().item<double>(), tolerance) << what;
}

WanVaeConfig Golden21(std::vector<int64_t> dim_mult) {
  return {.base_dim = 4, .dim_mult = std::move(dim_mult), .num_res_blocks = 1};
}

WanVaeConfig Golden22() {
  WanVaeConfig config = Tiny22();
  config.base_dim = 4;
  config.z_dim = 12;
  config.dim_mult = {1, 2, 4, 4};
  return config;
}

struct GoldenCase {
  std::string file;
  WanVaeConfig config;
  std::vector<int64_t> latents, pixels;
  std::optional<WanVaeTiling> tiling;
};

// The configurations of tools/make_vae_goldens.py.
std::vector<GoldenCase> GoldenCases() {
  GoldenCase uneven{
      "wan21-uneven", Golden21({1, 3, 2, 4}), {3, 5, 3}, {9, 24, 40}, WanVaeTiling{24, 16, 16, 8}};
  GoldenCase time_first{"wan21-time-first",
                        Golden21({1, 2, 2, 2}),
                        {3, 3, 5},
                        {5, 40, 24},
                        WanVaeTiling{32, 24, 8, 16}};
  time_first.config.temperal_downsample = {true, true, false};
  GoldenCase one_row{"wan21-long", Golden21({1, 1, 1, 1}), {7, 1, 2}, {25, 8, 16}, std::nullopt};
  GoldenCase uneven22{
      "wan22-uneven", Golden22(), {3, 3, 5}, {9, 48, 32}, WanVaeTiling{32, 48, 16, 32}};
  uneven22.config.decoder_base_dim = 6;
  GoldenCase time_first22{"wan22-time-first", Golden22(), {3, 2, 3}, {9, 32, 48}, std::nullopt};
  time_first22.config.temperal_downsample = {true, false, true};
  return {uneven, time_first, one_row, uneven22, time_first22};
}

TEST(WanVae, MatchesDiffusersGoldens) {
  for (const GoldenCase& c : GoldenCases()) {
    SCOPED_TRACE(c.file);
    const auto want = ReadTensors(Source("tests/goldens/vae/" + c.file + ".safetensors"));
    ASSERT_TRUE(want.contains("decoded"));
    const WanVae vae(c.config, HashWeights(c.config), {.encoder = true});
    std::vector<int64_t> shape = {1, c.config.z_dim};
    shape.insert(shape.end(), c.latents.begin(), c.latents.end());
    const at::Tensor z = Input("input.latents", shape);
    ExpectClose(DecodeAll(vae, z), want.at("decoded"), 1e-4, "decoded");
    shape = {1, 3};
    shape.insert(shape.end(), c.pixels.begin(), c.pixels.end());
    ExpectClose(vae.Encode(Input("input.pixels", shape)), want.at("encoded"), 1e-4, "encoded");
    ASSERT_EQ(want.contains("decoded_tiled"), c.tiling.has_value());
    if (c.tiling) {
      const WanVae tiled(c.config, HashWeights(c.config), {.tiling = c.tiling});
      ExpectClose(DecodeAll(tiled, z), want.at("decoded_tiled"), 1e-4, "decoded_tiled");
    }
  }
}

TEST(WanVae, DecodesTheDemoModelsLatentsToDiffusersFrames) {
  const auto config = ReadWanConfig(Source("assets/shapes"));
  ASSERT_TRUE(config.ok()) << config.status();
  const auto weights = ReadTensors(Source("assets/shapes/vae/diffusion_pytorch_model.safetensors"));
  const auto golden = ReadTensors(Source("assets/shapes/golden.safetensors"));
  const WanVae vae(config->vae, [&](const std::string& name) { return weights.at(name); },
                   {.encoder = true});
  const at::Tensor latents = golden.at("latents");
  std::vector<at::Tensor> chunks;
  std::vector<int64_t> sizes;
  EXPECT_TRUE(vae.Decode(DenormaliseLatents(config->vae, latents), [&](const at::Tensor& frames) {
    sizes.push_back(frames.size(0));
    chunks.push_back(frames);
    return true;
  }));
  EXPECT_THAT(sizes, ElementsAre(1, 4, 4, 4, 4));
  const at::Tensor frames = at::cat(chunks);
  ExpectClose(frames.unsqueeze(0), golden.at("frames"), 1e-4, "frames");

  // The model's own round trip is lossy; its latents come back near where they were.
  const at::Tensor pixels = (frames * 2 - 1).permute({3, 0, 1, 2}).unsqueeze(0).contiguous();
  const at::Tensor again = NormaliseLatents(config->vae, vae.Encode(pixels));
  EXPECT_LT((again - latents).abs().mean().item<double>(), 0.3);
}

TEST(WanVae, NormalisingInvertsDenormalising) {
  WanVaeConfig config = Tiny21();
  for (int64_t i = 0; i < config.z_dim; ++i) {
    config.latents_mean.push_back(0.5 - 0.1 * i);
    config.latents_std.push_back(0.5 + 0.2 * i);
  }
  const at::Tensor latents = Input("input.latents", {1, 16, 2, 2, 2});
  const at::Tensor z = DenormaliseLatents(config, latents);
  EXPECT_NEAR(z[0][3][1][1][0].item<float>(), latents[0][3][1][1][0].item<float>() * 1.1 + 0.2,
              1e-6);
  ExpectClose(NormaliseLatents(config, z), latents, 1e-6, "latents");
}

// ---- streaming ----

TEST(WanVae, FramesDependOnlyOnLatentFramesUpToTheirOwn) {
  const WanVae vae(Tiny21(), HashWeights(Tiny21()));
  const at::Tensor z = Input("input.latents", {1, 16, 4, 2, 3});
  const at::Tensor whole = DecodeAll(vae, z);
  const at::Tensor start = DecodeAll(vae, z.narrow(2, 0, 2));
  ExpectClose(whole.narrow(2, 0, start.size(2)), start, 1e-6, "start");
}

TEST(WanVae, ASecondVideoRemembersNothingOfTheFirst) {
  const WanVae vae(Tiny22(), HashWeights(Tiny22()));
  const at::Tensor z = Input("input.latents", {1, 48, 2, 2, 2});
  const at::Tensor first = DecodeAll(vae, z);
  DecodeAll(vae, Input("another.input", {1, 48, 3, 3, 2}));
  EXPECT_TRUE(at::equal(DecodeAll(vae, z), first));
}

// The bytes of tensors alive on this thread since its creation, at their highest.
class PeakMemory : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    live_ += bytes;
    peak_ = std::max(peak_, live_);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t peak() const { return peak_; }

 private:
  int64_t live_ = 0;
  int64_t peak_ = 0;
};

TEST(WanVae, MemoryDoesNotGrowWithTheLengthOfTheVideo) {
  const WanVae vae(Small21(), HashWeights(Small21()));
  const auto peak = [&](int64_t latent_frames) {
    const at::Tensor z = Input("input.latents", {1, 16, latent_frames, 4, 4});
    auto memory = std::make_shared<PeakMemory>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, memory);
    EXPECT_TRUE(vae.Decode(z, [](const at::Tensor&) { return true; }));
    return memory->peak();
  };
  const int64_t short_video = peak(3);
  EXPECT_GT(short_video, 4 * 32 * 32 * 4 * 4);  // a tensor at full size
  // The latents themselves are held once more, channels last.
  EXPECT_EQ(peak(9), short_video + 6 * 16 * 4 * 4 * 4);
}

TEST(WanVae, FalseFromTheCallbackStopsDecoding) {
  const WanVae vae(Tiny21(), HashWeights(Tiny21()));
  int calls = 0;
  EXPECT_FALSE(vae.Decode(Input("input.latents", {1, 16, 4, 2, 2}),
                          [&](const at::Tensor&) { return ++calls < 2; }));
  EXPECT_EQ(calls, 2);
}

TEST(WanVae, CancellationStopsATiledDecodeBetweenLatentFrames) {
  const WanVae vae(Tiny21(), HashWeights(Tiny21()), {.tiling = WanVaeTiling{32, 32, 24, 24}});
  int asked = 0;
  EXPECT_FALSE(vae.Decode(
      Input("input.latents", {1, 16, 2, 6, 7}),
      [](const at::Tensor&) {
        ADD_FAILURE() << "frames of a cancelled decode";
        return true;
      },
      [&] { return ++asked == 3; }));
  EXPECT_EQ(asked, 3);
}

TEST(WanVae, ATiledDecodeHandsFramesOutInTheChunksOfAnUntiledOne) {
  const WanVae vae(Tiny21(), HashWeights(Tiny21()), {.tiling = WanVaeTiling{32, 32, 24, 24}});
  std::vector<int64_t> sizes;
  EXPECT_TRUE(vae.Decode(Input("input.latents", {1, 16, 3, 6, 7}), [&](const at::Tensor& frames) {
    sizes.push_back(frames.size(0));
    return true;
  }));
  EXPECT_THAT(sizes, ElementsAre(1, 4, 4));
}

TEST(WanVae, RefusesInputOfTheWrongShape) {
  const WanVae vae(Tiny21(), HashWeights(Tiny21()), {.encoder = true});
  const auto decode = [&](at::IntArrayRef shape) {
    vae.Decode(at::zeros(shape), [](const at::Tensor&) { return true; });
  };
  EXPECT_THROW(decode({1, 12, 1, 2, 2}), c10::Error);
  EXPECT_THROW(decode({2, 16, 1, 2, 2}), c10::Error);
  EXPECT_THROW(decode({1, 16, 0, 2, 2}), c10::Error);
  EXPECT_THROW(vae.Encode(at::zeros({1, 3, 4, 16, 16})), c10::Error);
  EXPECT_THROW(vae.Encode(at::zeros({1, 3, 5, 20, 16})), c10::Error);
  EXPECT_THROW(WanVae(Tiny21(), HashWeights(Tiny21()), {.tiling = WanVaeTiling{32, 32, 0, 24}}),
               c10::Error);
}

TEST(WanVae, EveryThreadCountGivesTheSameFramesWithinRounding) {
  const WanVae vae(Small21(), HashWeights(Small21()));
  const at::Tensor z = Input("input.latents", {1, 16, 2, 3, 4});
  const at::Tensor one = DecodeAll(vae, z);
  at::set_num_threads(2);
  ExpectClose(DecodeAll(vae, z), one, 1e-5, "two threads");
  at::set_num_threads(1);
}

TEST(PatchifyTest, PutsColumnsBeforeRowsIntoTheChannels) {
  // One channel, 2x4 pixels: two patches side by side.
  const at::Tensor frame = at::arange(8, at::kFloat).view({1, 2, 4, 1});
  const at::Tensor patches = Patchify(frame, 2);
  EXPECT_TRUE(at::equal(patches[0][0][1], at::tensor({2.0f, 6.0f, 3.0f, 7.0f})));
  EXPECT_TRUE(at::equal(Unpatchify(patches, 2), frame));
}

// ---- kernel ----

TEST(NormRows, MatchesFloat64OverWidthsAndMagnitudes) {
  for (const int64_t channels : {1, 3, 8, 15, 16, 33, 96}) {
    for (const double scale : {1e-20, 1e-3, 1.0, 1e4}) {
      const at::Tensor x = Input("x", {40, channels}) * scale;
      const at::Tensor gain =
          Input("gain", {channels}) * 120;  // far into both tails of the sigmoid
      for (const bool silu : {false, true}) {
        at::Tensor got = at::empty_like(x);
        NormRows(x.const_data_ptr<float>(), gain.const_data_ptr<float>(), 40, channels, silu,
                 got.mutable_data_ptr<float>());
        const at::Tensor d = x.to(at::kDouble);
        at::Tensor want = d / d.norm(2, {-1}, true).clamp_min(1e-12) * gain.to(at::kDouble);
        // Rounding of the argument counts |v| times in the exponential.
        const at::Tensor slack = 1e-6 * (1 + want.abs()) * want.abs() + 1e-30;
        if (silu) want = want * want.sigmoid();
        EXPECT_TRUE(((got.to(at::kDouble) - want).abs() <= slack).all().item<bool>())
            << channels << " channels, scale " << scale << ", silu " << silu;
      }
    }
  }
}

TEST(NormRows, ZerosStayZerosAndNotANumberStaysInItsRow) {
  std::vector<float> x(3 * 16, 0.0f), y(x.size(), 1.0f);
  const std::vector<float> gain(16, 2.0f);
  x[20] = std::nanf("");
  NormRows(x.data(), gain.data(), 3, 16, true, y.data());
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(y[i], 0.0f);
    EXPECT_TRUE(std::isnan(y[16 + i]));
    EXPECT_EQ(y[32 + i], 0.0f);
  }
}

}  // namespace
}  // namespace dlo
