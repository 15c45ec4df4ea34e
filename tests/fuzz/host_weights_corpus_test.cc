// Runs every file of the committed corpus through what the fuzzers run, on every build.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/fuzz/host_weights_fuzz.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;

struct Corpus {
  const char* folder;
  bool (*run)(absl::Span<const std::byte>);
  int accepted_min;
};

class HostWeightsCorpusTest : public ::testing::TestWithParam<Corpus> {};

// ok_*: accepted. bad_*: refused. Anything else (what a fuzzer found): must only keep the parser's
// promises.
TEST_P(HostWeightsCorpusTest, EveryFileMeetsItsFate) {
  const fs::path folder =
      fs::path(DLO_SOURCE_DIR) / "tests/fuzz/host_weights_corpus" / GetParam().folder;
  int accepted = 0, refused = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    SCOPED_TRACE(entry.path().native());
    std::ifstream in(entry.path(), std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    const bool ok = GetParam().run(
        absl::MakeConstSpan(reinterpret_cast<const std::byte*>(text.data()), text.size()));
    const std::string name = entry.path().filename().native();
    if (name.rfind("ok_", 0) == 0) {
      EXPECT_TRUE(ok);
    }
    if (name.rfind("bad_", 0) == 0) {
      EXPECT_FALSE(ok);
    }
    ++(ok ? accepted : refused);
  }
  EXPECT_GE(accepted, GetParam().accepted_min) << "the corpus is not where it should be";
  EXPECT_GE(refused, 10);
}

INSTANTIATE_TEST_SUITE_P(Corpora, HostWeightsCorpusTest,
                         ::testing::Values(Corpus{"identity", RunIdentity, 4},
                                           Corpus{"manifest", RunManifest, 3},
                                           Corpus{"ready", RunReady, 1},
                                           Corpus{"config", RunModelConfig, 3}),
                         [](const auto& info) { return std::string(info.param.folder); });

}  // namespace
}  // namespace dlo
