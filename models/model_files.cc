#include "models/model_files.h"

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "loader/checkpoint.h"
#include "loader/weights.h"
#include "models/text/t5_tokenizer.h"
#include "models/wan/wan_card.h"
#include "models/wan/wan_weight_needs.h"

namespace dlo {
namespace {

absl::StatusOr<std::string> CheckComponent(const ComponentNeeds& needs,
                                           const Checkpoint& checkpoint) {
  RETURN_IF_ERROR(
      CheckTensors(checkpoint, needs.specs, {.ignore_unexpected = needs.ignore_unexpected}));
  int64_t bytes = 0;
  for (const TensorSpec& spec : needs.specs) bytes += spec.bytes();
  const size_t files = checkpoint.files().size();
  return absl::StrFormat("%s: %d tensors in %d file%s, %.1f MB in memory", needs.name,
                         needs.specs.size(), files, files == 1 ? "" : "s",
                         static_cast<double>(bytes) / 1e6);
}

}  // namespace

absl::StatusOr<std::vector<std::string>> CheckModelFiles(
    const std::filesystem::path& root, DType dtype,
    const std::optional<HostWeightSettings>& streaming, OnlineQuantization quantization) {
  // The card's own checks include the defaults of an optional dlo.json.
  RETURN_IF_ERROR(ReadWanCard(root).status());
  ASSIGN_OR_RETURN(const WanConfig config, ReadWanConfig(root));
  std::vector<std::string> lines;

  ASSIGN_OR_RETURN(const std::unique_ptr<T5Tokenizer> tokenizer,
                   T5Tokenizer::Load(root / "tokenizer"));
  if (tokenizer->vocab_size() > config.text_encoder.vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        (root / "tokenizer").string(), ": makes ids up to ", tokenizer->vocab_size() - 1,
        ", but the text encoder has vocab_size ", config.text_encoder.vocab_size));
  }
  lines.push_back(absl::StrCat("tokenizer: ", tokenizer->vocab_size(), " ids"));

  const std::vector<ComponentNeeds> needs = WanWeightNeeds(config, dtype, quantization);
  std::vector<WeightSource> sources;
  for (const ComponentNeeds& component : needs) {
    ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(root / component.folder));
    ASSIGN_OR_RETURN(std::string line, CheckComponent(component, checkpoint));
    lines.push_back(std::move(line));
    sources.push_back(DescribeSource(component.folder, checkpoint));
  }
  if (streaming) {
    const HostWeightPlan plan = PlanHostWeights(needs, sources, *streaming);
    RETURN_IF_ERROR(CheckHostWeightPlan(plan, *streaming));
    for (const ComponentPlan& component : plan.components) {
      lines.push_back(absl::StrCat("host weights of ", component.Text()));
    }
  }
  return lines;
}

}  // namespace dlo
