#include "models/host_weight_identity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "loader/test_folder.h"
#include "loader/weights.h"
#include "models/wan/wan_test_repository.h"
#include "models/wan/wan_weight_needs.h"
#include "offload/block_layout.h"
#include "tests/support/hash_checkpoint.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;

class HostWeightIdentityTest : public ::testing::Test {
 protected:
  HostWeightIdentityTest() {
    for (const ComponentNeeds& needs : WanWeightNeeds(*ReadWanConfig(root()), DType::kF32)) {
      EXPECT_TRUE(WriteHashCheckpoint(root() / needs.folder, needs.specs, needs.name).ok());
    }
  }
  const fs::path& root() const { return repository_.root(); }

  HostWeightArtifact Describe(const fs::path& root, DType dtype = DType::kBF16) {
    absl::StatusOr<HostWeightArtifact> artifact = DescribeHostWeights(root, {.dtype = dtype});
    EXPECT_TRUE(artifact.ok()) << artifact.status();
    return artifact.ok() ? *std::move(artifact) : HostWeightArtifact();
  }
  std::string Key() { return Describe(root()).identity.key; }

  WanTestRepository repository_;
};

TEST_F(HostWeightIdentityTest, EverySpellingAndCopyOfAModelHasTheSameKey) {
  const std::string key = Key();
  TempFolder elsewhere;
  fs::create_directory_symlink(root(), elsewhere / "link");
  EXPECT_EQ(Describe(elsewhere / "link").identity.key, key);
  EXPECT_EQ(Describe(fs::relative(root())).identity.key, key);
  fs::copy(root(), elsewhere / "copy", fs::copy_options::recursive);
  EXPECT_EQ(Describe(elsewhere / "copy").identity.key, key);
}

TEST_F(HostWeightIdentityTest, DTypeWeightsAndConfigurationChangeTheKey) {
  std::set<std::string> keys = {Key()};
  EXPECT_TRUE(keys.insert(Describe(root(), DType::kF32).identity.key).second);
  const auto quantised =
      DescribeHostWeights(root(), {.quantization = OnlineQuantization::kPerTensorFp8});
  ASSERT_TRUE(quantised.ok()) << quantised.status();
  EXPECT_TRUE(keys.insert(quantised->identity.key).second);
  EXPECT_THAT(quantised->identity.document, testing::HasSubstr("fp8"));

  std::vector<ComponentNeeds> needs = WanWeightNeeds(*ReadWanConfig(root()), DType::kF32);
  for (const ComponentNeeds& component : needs) {
    ASSERT_TRUE(WriteHashCheckpoint(root() / component.folder, component.specs, "other").ok());
    EXPECT_TRUE(keys.insert(Key()).second) << component.name;
  }
  repository_.Patch("transformer/config.json", {{"eps", 1e-5}});
  EXPECT_TRUE(keys.insert(Key()).second);
  // How it is sampled is not the weights' concern.
  repository_.Patch("scheduler/scheduler_config.json", {{"flow_shift", 5.0}});
  EXPECT_FALSE(keys.insert(Key()).second);
}

TEST_F(HostWeightIdentityTest, TheLayoutIsThatOfTheBlocksInMemory) {
  const HostWeightArtifact artifact = Describe(root());
  ASSERT_TRUE(hwr::CheckLayout(artifact.layout).ok());
  ASSERT_EQ(artifact.layout.size(), 3);
  EXPECT_EQ(artifact.layout[0].name, "text_encoder");
  EXPECT_EQ(artifact.layout[1].name, "transformer");
  EXPECT_EQ(artifact.layout[2].name, "vae");
  EXPECT_EQ(artifact.layout[2].parts.size(), 1) << "it has no ring";
  for (size_t c = 0; c < artifact.layout.size(); ++c) {
    for (size_t p = 0; p < artifact.layout[c].parts.size(); ++p) {
      const BlockLayout layout = BlockLayout::Of(artifact.specs[c][p]);
      EXPECT_EQ(artifact.layout[c].parts[p].bytes, layout.total_bytes());
    }
  }
}

TEST_F(HostWeightIdentityTest, TheProducerGivesWhatACanonicalLoadHolds) {
  const HostWeightArtifact artifact = Describe(root());
  CheckpointProducer producer(artifact);
  EXPECT_TRUE(producer.CheckSources().ok());
  for (size_t c = 0; c < artifact.layout.size(); ++c) {
    // All of a component in one go, as a start does it.
    std::vector<TensorSpec> specs;
    for (const auto& part : artifact.specs[c]) specs.insert(specs.end(), part.begin(), part.end());
    std::vector<std::vector<std::byte>> canonical;
    std::vector<std::byte*> destinations;
    for (const TensorSpec& spec : specs) {
      canonical.emplace_back(spec.bytes());
      destinations.push_back(canonical.back().data());
    }
    ASSERT_TRUE(LoadTensors(*artifact.checkpoints[c], specs, destinations, {.partial = true}).ok());
    size_t tensor = 0;
    for (size_t p = 0; p < artifact.layout[c].parts.size(); ++p) {
      const hwr::ArtifactPart& part = artifact.layout[c].parts[p];
      std::vector<std::byte> bytes(part.bytes);
      ASSERT_TRUE(
          producer.Produce(static_cast<int>(c), static_cast<int>(p), absl::MakeSpan(bytes)).ok());
      for (const hwr::ArtifactTensor& entry : part.tensors) {
        EXPECT_EQ(std::memcmp(bytes.data() + entry.offset, canonical[tensor].data(), entry.bytes),
                  0)
            << entry.name;
        ++tensor;
      }
    }
  }
}

TEST_F(HostWeightIdentityTest, AChangedSourceIsNoticed) {
  const HostWeightArtifact artifact = Describe(root());
  CheckpointProducer producer(artifact);
  const std::vector<ComponentNeeds> needs = WanWeightNeeds(*ReadWanConfig(root()), DType::kF32);
  ASSERT_TRUE(WriteHashCheckpoint(root() / "vae", needs.back().specs, "other").ok());
  EXPECT_EQ(producer.CheckSources().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(HostWeightIdentityTest, AMissingFileIsAnOrdinaryLoadError) {
  fs::remove(root() / "vae/diffusion_pytorch_model.safetensors");
  EXPECT_EQ(DescribeHostWeights(root(), {}).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace dlo
