#include "models/wan/wan_work.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "models/umt5/umt5_specs.h"
#include "models/wan/transformer_specs.h"
#include "models/wan/vae_specs.h"
#include "models/wan/wan_plan.h"

namespace dlo {
namespace {

constexpr int64_t kPromptTokensMax = 512;
constexpr int64_t kBytesPerToken = 4;

int64_t PromptTokens(const std::string& prompt) {
  return std::min<int64_t>(static_cast<int64_t>(prompt.size()) / kBytesPerToken + 1,
                           kPromptTokensMax);
}

// Of a product of an [m, k] with a [k, n] matrix.
double Product(double m, double k, double n) { return 2 * m * k * n; }

double TextFlops(const Umt5Config& config, double tokens) {
  const auto model = static_cast<double>(config.d_model);
  const auto inner = static_cast<double>(config.num_heads * config.d_kv);
  const auto feed = static_cast<double>(config.d_ff);
  const double layer = 4 * Product(tokens, model, inner) + 2 * Product(tokens, inner, tokens) +
                       3 * Product(tokens, model, feed);
  return layer * static_cast<double>(config.num_layers);
}

// One forward of one branch of guidance.
double TransformerFlops(const WanTransformerConfig& config, double tokens, double text_tokens) {
  const auto hidden = static_cast<double>(config.hidden_size());
  const auto feed = static_cast<double>(config.ffn_dim);
  const double self_attention =
      4 * Product(tokens, hidden, hidden) + 2 * Product(tokens, hidden, tokens);
  const double cross_attention =
      2 * Product(tokens, hidden, hidden) + 2 * Product(tokens, hidden, text_tokens);
  const double feed_forward = 2 * Product(tokens, hidden, feed);
  const auto [frames, rows, columns] = config.patch_size;
  const auto patch = static_cast<double>(frames * rows * columns);
  const double ends = Product(tokens, patch * static_cast<double>(config.in_channels), hidden) +
                      Product(tokens, hidden, patch * static_cast<double>(config.out_channels));
  return (self_attention + cross_attention + feed_forward) *
             static_cast<double>(config.num_layers) +
         ends;
}

double ConvFlops(double positions, int64_t kernel, int64_t in, int64_t out) {
  return Product(positions, static_cast<double>(kernel * in), static_cast<double>(out));
}

double ResnetFlops(double positions, const VaeResnet& resnet) {
  double flops = ConvFlops(positions, 27, resnet.in_channels, resnet.out_channels) +
                 ConvFlops(positions, 27, resnet.out_channels, resnet.out_channels);
  if (resnet.in_channels != resnet.out_channels) {
    flops += ConvFlops(positions, 1, resnet.in_channels, resnet.out_channels);
  }
  return flops;
}

// Of `latent_frames` of latents of height x width.
double DecodeFlops(const WanVaeConfig& config, int64_t latent_frames, int64_t height,
                   int64_t width) {
  const VaeHalf half = WanVaeDecoderHalf(config);
  // The first frame is never doubled in time.
  int64_t frames_per_latent = 1;
  const auto positions = [&] {
    return static_cast<double>((latent_frames - 1) * frames_per_latent + 1) *
           static_cast<double>(height * width);
  };
  const auto latent_pixels = static_cast<double>(height * width);
  const auto channels = static_cast<double>(half.mid_channels);
  double flops = ConvFlops(positions(), 27, half.in_channels, half.first_channels) +
                 2 * ResnetFlops(positions(), {"", half.mid_channels, half.mid_channels}) +
                 4 * Product(positions(), channels, channels) +
                 2 * Product(positions(), channels, latent_pixels);
  for (const VaeStage& stage : half.stages) {
    for (const VaeResnet& resnet : stage.resnets) flops += ResnetFlops(positions(), resnet);
    if (stage.resample == Resample::kNone) continue;
    if (stage.resample == Resample::kUpsample3d) {
      flops += ConvFlops(positions(), 3, stage.out_channels, 2 * stage.out_channels);
      frames_per_latent *= 2;
    }
    height *= 2;
    width *= 2;
    flops += ConvFlops(positions(), 9, stage.out_channels, stage.resample_channels);
  }
  return flops + ConvFlops(positions(), 27, half.last_channels, half.out_channels);
}

// Of a component's block, as it is streamed; all are alike.
BlockLayout BlockOf(const std::vector<TensorSpec>& specs) {
  std::vector<TensorSpec> block;
  for (const TensorSpec& spec : specs) {
    if (spec.block == 0) block.push_back(spec);
  }
  return BlockLayout::Of(block);
}

}  // namespace

absl::StatusOr<RequestWork> WanWork(const WanConfig& config, DType dtype,
                                    const RequestToPlan& request) {
  const VideoSettings& settings = request.settings;
  RequestWork work;
  ASSIGN_OR_RETURN(work.plan, WanVisitPlan(config, settings, request.resident_blocks));
  ASSIGN_OR_RETURN(const VisitPlan all, WanVisitPlan(config, settings));
  Umt5Config text_encoder = config.text_encoder;
  text_encoder.num_layers = 1;
  work.rings = {{"text_encoder", BlockOf(Umt5Specs(text_encoder, dtype))}};
  const auto add_expert = [&](const char* name, WanTransformerConfig expert) {
    expert.num_layers = 1;
    work.rings.push_back({name, BlockOf(WanTransformerSpecs(expert, dtype, request.quantization))});
  };
  add_expert("transformer", config.transformer);
  if (config.transformer_2) add_expert("transformer_2", *config.transformer_2);

  const bool guided = settings.guidance_scale > 1;
  std::vector<int64_t> texts = {PromptTokens(request.prompt)};
  if (guided) texts.push_back(PromptTokens(request.negative_prompt));
  for (int64_t tokens : texts) {
    work.text_flops += TextFlops(config.text_encoder, static_cast<double>(tokens));
  }

  const WanVaeConfig& vae = config.vae;
  const int64_t frames = (settings.num_frames - 1) / vae.scale_factor_temporal + 1;
  const int64_t height = settings.height / vae.scale_factor_spatial;
  const int64_t width = settings.width / vae.scale_factor_spatial;
  for (const VisitPlan::Run& run : all.runs()) {
    if (run.ring == kWanTextRing) continue;
    const WanTransformerConfig& expert =
        run.ring == kWanTransformerRing ? config.transformer : *config.transformer_2;
    const auto [pt, ph, pw] = expert.patch_size;
    const auto tokens = static_cast<double>((frames / pt) * (height / ph) * (width / pw));
    for (int64_t text : texts) {
      // The padding of the text is one token more.
      work.denoise_flops += TransformerFlops(expert, tokens, static_cast<double>(text + 1)) *
                            static_cast<double>(run.passes);
    }
  }
  // A VAE that folds patches of pixels into channels works on fewer of them, as its stages say.
  work.decode_flops = DecodeFlops(vae, frames, height, width);
  return work;
}

}  // namespace dlo
