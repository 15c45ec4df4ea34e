// What a model's artifact of host weights holds and what identifies it: the same computation for a
// worker that starts and for dlo-weights prewarm. Torch-free.
//
//   ASSIGN_OR_RETURN(HostWeightArtifact artifact,
//                    DescribeHostWeights(root, {.dtype = DType::kBF16, .from_hub = true}));
//   store->Lookup(artifact.identity, ...);
//   CheckpointProducer producer(artifact);
//   store->Publish(artifact.identity, artifact.layout, producer, {});
//
// Stateless; any thread.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/dtype.h"
#include "base/quantization.h"
#include "base/tensor_spec.h"
#include "loader/checkpoint.h"
#include "loader/hwr/identity.h"
#include "loader/hwr/layout.h"
#include "loader/hwr/source_fingerprint.h"
#include "loader/hwr/store.h"

namespace dlo {

struct HostWeightRun {
  DType dtype = DType::kBF16;
  OnlineQuantization quantization = OnlineQuantization::kNone;
  // The model was named by a hub id, not by a folder: names of blobs may stand for hashing.
  bool from_hub = false;
  const hwr::DigestCache* cache = nullptr;
  int threads = 0;  // that hash; 0: as many as there are cores
};

struct HostWeightArtifact {
  hwr::Identity identity;
  hwr::ArtifactLayout layout;
  hwr::SourceFingerprint sources;
  // Per component of the layout, in its order: the tensors of each part, in the order of the
  // layout's, and where they come from.
  std::vector<std::vector<std::vector<TensorSpec>>> specs;
  std::vector<std::shared_ptr<const Checkpoint>> checkpoints;
};

// A component of these tensors, each part of it as offload/block_layout.h lays it out.
hwr::ArtifactComponent DescribeComponent(const std::string& name,
                                         absl::Span<const TensorSpec> specs);

// Reads the configuration and the headers of the repository at `root`, and as much of the weight
// files as their fingerprint needs. Errors as ReadWanConfig, Checkpoint::Open, CheckTensors and
// FingerprintSources.
absl::StatusOr<HostWeightArtifact> DescribeHostWeights(const std::filesystem::path& root,
                                                       const HostWeightRun& settings);

// Fills parts from the checkpoint, one at a time: nothing beyond the part is held.
class CheckpointProducer : public hwr::PartProducer {
 public:
  // `artifact` outlives this. threads as in LoadOptions.
  explicit CheckpointProducer(const HostWeightArtifact& artifact, int threads = 0)
      : artifact_(artifact), threads_(threads) {}

  absl::Status Produce(int component, int part, absl::Span<std::byte> to) override;
  absl::Status CheckSources() override { return artifact_.sources.CheckUnchanged(); }

 private:
  const HostWeightArtifact& artifact_;
  const int threads_;
};

}  // namespace dlo
