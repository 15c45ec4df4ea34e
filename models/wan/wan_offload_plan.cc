#include "models/wan/wan_offload_plan.h"

#include "models/umt5/umt5_specs.h"
#include "models/wan/transformer_specs.h"
#include "models/wan/vae_specs.h"
#include "models/wan/wan_plan.h"

namespace dlo {

std::vector<std::string> WanComponentNames(const WanConfig& config) {
  std::vector<std::string> names = {"text_encoder", "transformer", "vae"};
  if (config.transformer_2) names.push_back("transformer_2");
  return names;
}

OffloadPlan WanOffloadPlan(const WanConfig& config, DType dtype, OnlineQuantization quantization) {
  OffloadPlan plan;
  plan.components.push_back({.name = "text_encoder",
                             .specs = Umt5DeviceSpecs(config.text_encoder, dtype),
                             .ring = kWanTextRing,
                             .stage = ComponentStage::kText});
  plan.components.push_back({.name = "transformer",
                             .specs = WanTransformerSpecs(config.transformer, dtype, quantization),
                             .ring = kWanTransformerRing,
                             .stage = ComponentStage::kDenoise});
  if (config.transformer_2) {
    plan.components.push_back(
        {.name = "transformer_2",
         .specs = WanTransformerSpecs(*config.transformer_2, dtype, quantization),
         .ring = kWanTransformer2Ring,
         .stage = ComponentStage::kDenoise});
  }
  // Serving only decodes.
  plan.components.push_back({.name = "vae",
                             .specs = WanVaeSpecs(config.vae, /*encoder=*/false),
                             .stage = ComponentStage::kDecode});
  return plan;
}

}  // namespace dlo
