#include "models/wan/wan_weight_needs.h"

#include <memory>
#include <utility>

#include "models/umt5/umt5_specs.h"
#include "models/wan/wan_offload_plan.h"

namespace dlo {

std::vector<ComponentNeeds> WanWeightNeeds(const WanConfig& config, DType dtype,
                                           OnlineQuantization quantization) {
  // Published files keep the modulation tables and cross-attention norms in float32 or store all
  // alike.
  const auto adapter = std::make_shared<const KeptFloat32Adapter>(dtype);
  OffloadPlan plan = WanOffloadPlan(config, dtype, quantization);
  std::vector<ComponentNeeds> needs;
  for (OffloadComponent& component : plan.components) {
    ComponentNeeds need = {.name = component.name,
                           .folder = component.name,
                           .streamed = component.ring.has_value(),
                           .specs = std::move(component.specs),
                           .adapter = adapter};
    switch (component.stage) {
      case ComponentStage::kText:
        need.specs.push_back(Umt5TokenTable(config.text_encoder, dtype));
        break;
      case ComponentStage::kDenoise:
        // diffusers, too, passes over these norms of image-conditioned checkpoints.
        need.ignore_unexpected = {"norm_added_q"};
        break;
      case ComponentStage::kDecode:
        need.ignore_unexpected = {"encoder.", "quant_conv."};  // serving only decodes
        break;
    }
    needs.push_back(std::move(need));
  }
  return needs;
}

}  // namespace dlo
