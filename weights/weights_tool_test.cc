#include "weights/weights_tool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "loader/hwr/store.h"
#include "loader/test_folder.h"
#include "models/host_weight_identity.h"
#include "models/wan/wan_test_repository.h"
#include "models/wan/wan_weight_needs.h"
#include "nlohmann/json.hpp"
#include "tests/support/hash_checkpoint.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class WeightsToolTest : public ::testing::Test {
 protected:
  WeightsToolTest() {
    for (const ComponentNeeds& needs : WanWeightNeeds(*ReadWanConfig(model()), DType::kF32)) {
      EXPECT_TRUE(WriteHashCheckpoint(model() / needs.folder, needs.specs, needs.name).ok());
    }
  }
  const fs::path& model() const { return repository_.root(); }
  fs::path root() const { return folder_ / "store"; }

  int Run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "dlo-weights");
    std::vector<const char*> argv;
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    std::ostringstream out, err;
    const int code = RunWeightsTool(static_cast<int>(argv.size()), argv.data(), out, err);
    out_ = out.str();
    err_ = err.str();
    return code;
  }
  int Prewarm(const std::string& dtype = "bfloat16") {
    return Run({"prewarm", "--root", root(), "--model", model(), "--dtype", dtype});
  }
  std::string Key(DType dtype = DType::kBF16) {
    return DescribeHostWeights(model(), {.dtype = dtype})->identity.key;
  }
  nlohmann::json Listed() {
    EXPECT_EQ(Run({"list", "--root", root(), "--json"}), 0) << err_;
    return nlohmann::json::parse(out_)["entries"];
  }

  WanTestRepository repository_;
  TempFolder folder_;
  std::string out_;
  std::string err_;
};

TEST_F(WeightsToolTest, PrewarmPublishesWhatAWorkerLooksFor) {
  ASSERT_EQ(Prewarm(), 0) << err_;
  EXPECT_THAT(out_, HasSubstr("key: " + Key()));
  EXPECT_THAT(out_, HasSubstr("artifact: published"));
  const HostWeightArtifact artifact = *DescribeHostWeights(model(), {});
  hwr::Store::OpenResult opened = hwr::Store::Open({.root = root()});
  const auto& store = std::get<std::unique_ptr<hwr::Store>>(opened);
  const hwr::LookupResult found =
      store->Lookup(artifact.identity, {.validation = hwr::Validation::kFull});
  ASSERT_TRUE(found.lease.has_value()) << found.failure.Text();
  CheckpointProducer producer(artifact);
  for (int c = 0; c < static_cast<int>(artifact.layout.size()); ++c) {
    for (int p = 0; p < static_cast<int>(artifact.layout[c].parts.size()); ++p) {
      std::vector<std::byte> expected(artifact.layout[c].parts[p].bytes);
      ASSERT_TRUE(producer.Produce(c, p, absl::MakeSpan(expected)).ok());
      EXPECT_EQ(found.lease->part(c, p), absl::MakeConstSpan(expected)) << c << " " << p;
    }
  }
  EXPECT_EQ(Prewarm(), 0);
  EXPECT_THAT(out_, HasSubstr("already-present"));
  EXPECT_EQ(Prewarm("float32"), 0);
  EXPECT_THAT(out_, HasSubstr("published"));
  EXPECT_EQ(Listed().size(), 2u);
}

TEST_F(WeightsToolTest, ListTellsWhatThereIs) {
  ASSERT_EQ(Prewarm(), 0);
  const nlohmann::json entries = Listed();
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_EQ(entries[0]["key"], Key());
  EXPECT_EQ(entries[0]["state"], "ready");
  EXPECT_EQ(entries[0]["pinned"], false);
  EXPECT_EQ(entries[0]["identity"]["representation"]["dtype"], "BF16");
  EXPECT_EQ(Run({"list", "--root", root()}), 0);
  EXPECT_THAT(out_, HasSubstr(Key().substr(0, 16)));
  EXPECT_THAT(out_, HasSubstr("wan BF16"));
}

TEST_F(WeightsToolTest, VerifyFindsAFlippedByteAndMovesTheArtifactAway) {
  ASSERT_EQ(Prewarm(), 0);
  EXPECT_EQ(Run({"verify", "--root", root()}), 0) << err_;
  EXPECT_THAT(out_, HasSubstr("as it was published"));
  const fs::path payload = root() / "artifacts" / Key() / "transformer.bin";
  chmod(payload.c_str(), 0644);
  {
    std::fstream file(payload, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(100);
    file.put('\x55');
    file.put('\x55');
  }
  chmod(payload.c_str(), 0444);
  EXPECT_EQ(Run({"verify", "--root", root(), Key().substr(0, 8)}), 1);
  EXPECT_THAT(err_, HasSubstr("checksum-mismatch"));
  ASSERT_EQ(Listed().size(), 1u);
  EXPECT_EQ(Listed()[0]["state"], "quarantined");
  EXPECT_EQ(Run({"evict", "--root", root(), "--quarantine", "--older-than", "1h"}), 0);
  EXPECT_THAT(out_, HasSubstr("0 removed"));
  EXPECT_EQ(Run({"evict", "--root", root(), "--quarantine"}), 0);
  EXPECT_THAT(Listed(), IsEmpty());
}

TEST_F(WeightsToolTest, APinnedArtifactIsNotEvicted) {
  ASSERT_EQ(Prewarm(), 0);
  EXPECT_EQ(Run({"pin", "--root", root(), Key()}), 0) << err_;
  EXPECT_EQ(Listed()[0]["pinned"], true);
  EXPECT_EQ(Run({"evict", "--root", root(), Key()}), 1);
  EXPECT_THAT(err_, HasSubstr("pinned"));
  EXPECT_EQ(Run({"unpin", "--root", root(), Key()}), 0);
  EXPECT_EQ(Run({"evict", "--root", root(), Key()}), 0) << err_;
  EXPECT_THAT(Listed(), IsEmpty());
}

TEST_F(WeightsToolTest, TheLeastRecentlyUsedMakesRoom) {
  ASSERT_EQ(Run({"prewarm", "--root", root(), "--model", model(), "--max-store-bytes", "10MB"}), 0)
      << err_;
  EXPECT_EQ(Run({"evict", "--root", root(), "--fit", "9.99MB"}), 0) << err_;
  EXPECT_THAT(Listed(), IsEmpty());
  EXPECT_EQ(Run({"evict", "--root", root(), "--fit", "20MB"}), 1);
  // Other limits than the store was made with.
  EXPECT_EQ(Run({"prewarm", "--root", root(), "--model", model(), "--max-store-bytes", "11MB"}), 1);
  EXPECT_THAT(err_, HasSubstr("other limits"));
}

TEST_F(WeightsToolTest, ALimitThatServersCannotAskForDoesNotKeepThemOut) {
  ASSERT_EQ(Run({"prewarm", "--root", root(), "--model", model(), "--max-artifact-bytes", "10MB"}),
            0)
      << err_;
  EXPECT_EQ(Prewarm(), 0) << err_;
  const hwr::Store::OpenResult opened = hwr::Store::Open({.root = root()});
  ASSERT_TRUE(std::holds_alternative<std::unique_ptr<hwr::Store>>(opened));
  EXPECT_EQ(Run({"prewarm", "--root", root(), "--model", model(), "--max-artifact-bytes", "1MB"}),
            1);
  EXPECT_THAT(err_, HasSubstr("other limits"));
}

TEST_F(WeightsToolTest, OnlyPrewarmMakesAStore) {
  for (const char* command : {"list", "verify"}) {
    EXPECT_EQ(Run({command, "--root", root()}), 1);
    EXPECT_THAT(err_, HasSubstr("there is no store"));
  }
  EXPECT_EQ(Run({"pin", "--root", root(), std::string(64, '0')}), 1);
  EXPECT_EQ(Run({"evict", "--root", root(), "--quarantine"}), 1);
  EXPECT_FALSE(fs::exists(root()));
}

TEST_F(WeightsToolTest, AMissingModelIsTold) {
  EXPECT_EQ(Run({"prewarm", "--root", root(), "--model", folder_ / "none"}), 1);
  EXPECT_THAT(err_, HasSubstr("none"));
  EXPECT_FALSE(fs::exists(root()));
  fs::remove_all(model() / "vae");
  EXPECT_EQ(Prewarm(), 1);
  EXPECT_THAT(err_, HasSubstr("vae"));
}

TEST_F(WeightsToolTest, WrongCommandLinesAreRefused) {
  EXPECT_EQ(Run({}), 2);
  EXPECT_EQ(Run({"list"}), 2);
  EXPECT_EQ(Run({"prewarm", "--root", root()}), 2);
  EXPECT_EQ(Run({"prewarm", "--root", root(), "--model", "x", "--dtype", "fp8"}), 2);
  EXPECT_EQ(Run({"evict", "--root", root()}), 2);
  EXPECT_EQ(Run({"evict", "--root", root(), "--fit", "lots"}), 2);
  EXPECT_EQ(Run({"pin", "--root", root()}), 2);
  EXPECT_EQ(Run({"--version"}), 0);
  EXPECT_THAT(out_, HasSubstr("dlo-weights "));
}

TEST_F(WeightsToolTest, AKeyIsFoundByItsFirstDigits) {
  ASSERT_EQ(Prewarm(), 0);
  EXPECT_EQ(Run({"pin", "--root", root(), Key().substr(0, 8)}), 0) << err_;
  EXPECT_EQ(Run({"pin", "--root", root(), Key().substr(0, 7)}), 1) << "too few to mean it";
  EXPECT_EQ(Run({"pin", "--root", root(), "zzzzzzzz"}), 1);
}

}  // namespace
}  // namespace dlo
