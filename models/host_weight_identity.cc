#include "models/host_weight_identity.h"

#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "loader/weights.h"
#include "models/wan/wan_config.h"
#include "models/wan/wan_offload_plan.h"
#include "models/wan/wan_weight_needs.h"
#include "nlohmann/json.hpp"
#include "offload/block_layout.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;

// Of the configuration that the weights' bytes depend on: the pipeline's class and each component's
// own file, whatever their formatting.
absl::StatusOr<std::string> ConfigDigest(const fs::path& root,
                                         const std::vector<std::string>& components) {
  ASSIGN_OR_RETURN(const nlohmann::json index, ReadJsonFile(root / "model_index.json"));
  nlohmann::json configs = {{"model_index", index}};
  for (const std::string& component : components) {
    ASSIGN_OR_RETURN(configs[component], ReadJsonFile(root / component / "config.json"));
  }
  ASSIGN_OR_RETURN(const std::string document, hwr::CanonicalJson(configs));
  return Sha256Of(document);
}

hwr::SourceFiles FilesOf(const std::string& component, const Checkpoint& checkpoint) {
  hwr::SourceFiles files = {.component = component, .folder = checkpoint.dir(), .names = {}};
  for (const SafetensorsFile& file : checkpoint.files()) {
    files.names.push_back(file.path().lexically_relative(checkpoint.dir()).native());
  }
  return files;
}

// In the order of DescribeComponent.
std::vector<std::vector<TensorSpec>> SpecsOfParts(absl::Span<const TensorSpec> specs) {
  std::vector<std::vector<TensorSpec>> parts;
  for (const BlockLayout& layout : PartLayouts(specs)) {
    std::vector<TensorSpec>& part = parts.emplace_back();
    for (const BlockLayout::Tensor& tensor : layout.tensors()) part.push_back(tensor.spec);
  }
  return parts;
}

absl::Status Annotate(const absl::Status& status, absl::string_view component) {
  return status.ok() ? status
                     : absl::Status(status.code(), absl::StrCat(component, ": ", status.message()));
}

}  // namespace

hwr::ArtifactComponent DescribeComponent(const std::string& name,
                                         absl::Span<const TensorSpec> specs) {
  hwr::ArtifactComponent component;
  component.name = name;
  for (const BlockLayout& layout : PartLayouts(specs)) {
    hwr::ArtifactPart& part = component.parts.emplace_back();
    part.bytes = layout.total_bytes();
    for (const BlockLayout::Tensor& tensor : layout.tensors()) {
      part.tensors.push_back({.name = tensor.spec.name,
                              .dtype = tensor.spec.dtype,
                              .shape = tensor.spec.shape,
                              .offset = tensor.offset,
                              .bytes = tensor.spec.bytes()});
    }
  }
  return component;
}

absl::StatusOr<HostWeightArtifact> DescribeHostWeights(const fs::path& root,
                                                       const HostWeightRun& settings) {
  ASSIGN_OR_RETURN(const WanConfig config, ReadWanConfig(root));
  HostWeightArtifact artifact;
  std::vector<hwr::SourceFiles> sources;
  std::vector<std::string> names;
  const OffloadPlan plan = WanOffloadPlan(config, settings.dtype, settings.quantization);
  const std::vector<ComponentNeeds> needs =
      WanWeightNeeds(config, settings.dtype, settings.quantization);
  for (size_t i = 0; i < plan.components.size(); ++i) {
    const std::string& name = plan.components[i].name;
    absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(root / needs[i].folder);
    if (!checkpoint.ok()) return Annotate(checkpoint.status(), name);
    RETURN_IF_ERROR(Annotate(CheckTensors(*checkpoint, needs[i].specs,
                                          {.ignore_unexpected = needs[i].ignore_unexpected}),
                             name));
    sources.push_back(FilesOf(name, *checkpoint));
    artifact.layout.push_back(DescribeComponent(name, plan.components[i].specs));
    artifact.specs.push_back(SpecsOfParts(plan.components[i].specs));
    artifact.checkpoints.push_back(std::make_shared<const Checkpoint>(*std::move(checkpoint)));
    names.push_back(name);
  }
  RETURN_IF_ERROR(hwr::CheckLayout(artifact.layout));
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  ASSIGN_OR_RETURN(artifact.sources,
                   hwr::FingerprintSources(
                       sources, {.from_hub = settings.from_hub,
                                 .cache = settings.cache,
                                 .threads = settings.threads > 0 ? settings.threads : cores}));
  ASSIGN_OR_RETURN(std::string configs, ConfigDigest(root, names));
  ASSIGN_OR_RETURN(
      artifact.identity,
      hwr::MakeIdentity({.source = artifact.sources.digest(),
                         .family = "wan",
                         .model_config = std::move(configs),
                         .dtype = std::string(DTypeName(settings.dtype)),
                         .quantization = std::string(OnlineQuantizationName(settings.quantization)),
                         .layout = hwr::LayoutDigest(artifact.layout)}));
  return artifact;
}

absl::Status CheckpointProducer::Produce(int component, int part, absl::Span<std::byte> to) {
  const std::vector<TensorSpec>& specs = artifact_.specs[component][part];
  const hwr::ArtifactPart& layout = artifact_.layout[component].parts[part];
  std::vector<std::byte*> destinations;
  for (const hwr::ArtifactTensor& tensor : layout.tensors) {
    destinations.push_back(to.data() + tensor.offset);
  }
  return Annotate(LoadTensors(*artifact_.checkpoints[component], specs, destinations,
                              {.partial = true, .threads = threads_}),
                  artifact_.layout[component].name);
}

}  // namespace dlo
