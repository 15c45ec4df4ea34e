#include "server/reference_flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace dlo {
namespace {

using testing::HasSubstr;
using Flags = std::map<std::string, std::string>;

struct Row {
  const char* what;
  std::string arguments;  // after the program's name
  Flags own;
  Flags mapped;
  const char* refused = nullptr;  // or what the refusal says
};

class ReferenceFlagsTest : public testing::TestWithParam<Row> {};

TEST_P(ReferenceFlagsTest, SayWhatTheOwnFlagsWouldOrAreRefused) {
  CLI::App app;
  ReferenceFlags reference;
  reference.AddTo(app);
  app.parse(GetParam().arguments);
  const auto mapped = reference.Map(GetParam().own);
  if (GetParam().refused != nullptr) {
    EXPECT_EQ(mapped.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(mapped.status().message(), HasSubstr(GetParam().refused));
    return;
  }
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_EQ(mapped->values, GetParam().mapped);
}

const std::string kEnable = "--enable-distributed-layerwise-offload";

INSTANTIATE_TEST_SUITE_P(
    All, ReferenceFlagsTest,
    testing::Values(
        Row{"none", "", {}, {}}, Row{"none, own transfer", "", {{"--transfer", "rank-local"}}, {}},
        Row{"enabled", kEnable, {}, {{"--transfer", "allgather"}}},
        Row{"enabled, AllGather",
            kEnable + " --dlo-use-allgather",
            {},
            {{"--transfer", "allgather"}}},
        Row{"enabled, rank-local",
            kEnable + " --dlo-no-use-allgather",
            {},
            {{"--transfer", "rank-local"}}},
        Row{"enabled, residents",
            kEnable + " --dlo-no-use-allgather --dlo-resident-layers 4",
            {},
            {{"--transfer", "rank-local"}, {"--resident-layers", "4"}}},
        Row{"residents with the own transfer",
            "--dlo-resident-layers=4",
            {{"--transfer", "rank-local"}},
            {{"--resident-layers", "4"}}},
        // The own flag and the reference's may agree.
        Row{"both", kEnable, {{"--transfer", "rank-local"}}, {}},
        Row{"both, rank-local",
            kEnable + " --dlo-no-use-allgather",
            {{"--transfer", "rank-local"}},
            {}},
        Row{"the own transfer, confirmed",
            "--dlo-use-allgather",
            {{"--transfer", "allgather"}},
            {}},
        Row{"both residents",
            "--dlo-resident-layers 4",
            {{"--resident-layers", "4"}},
            {{"--resident-layers", "4"}}},
        Row{"the runtime",
            "--host-weight-runtime-mode required --host-weight-runtime-root=/w",
            {},
            {{"--host-weights-mode", "required"}, {"--host-weights-root", "/w"}}},
        Row{"the runtime, twice alike",
            "--host-weight-runtime-mode preferred",
            {{"--host-weights-mode", "preferred"}},
            {{"--host-weights-mode", "preferred"}}},
        Row{"older offloaders", "--enable-cpu-offload --enable-layerwise-offload", {}, {}},
        // Or not.
        Row{"off and on",
            kEnable,
            {{"--transfer", "none"}},
            {},
            "--enable-distributed-layerwise-offload and --transfer none say different things"},
        Row{"AllGather and rank-local",
            "--dlo-use-allgather",
            {{"--transfer", "rank-local"}},
            {},
            "--dlo-use-allgather and --transfer rank-local say different things"},
        Row{"rank-local and AllGather",
            kEnable + " --dlo-no-use-allgather",
            {{"--transfer", "allgather"}},
            {},
            "--dlo-no-use-allgather and --transfer allgather say different things"},
        Row{"the pair",
            kEnable + " --dlo-use-allgather --dlo-no-use-allgather",
            {},
            {},
            "--dlo-use-allgather and --dlo-no-use-allgather say different things"},
        Row{"residents twice",
            "--dlo-resident-layers 4",
            {{"--resident-layers", "3"}},
            {},
            "--dlo-resident-layers 4 and --resident-layers 3 say different things"},
        Row{"two modes",
            "--host-weight-runtime-mode preferred",
            {{"--host-weights-mode", "required"}},
            {},
            "--host-weight-runtime-mode preferred and --host-weights-mode required say different "
            "things"},
        Row{"two roots",
            "--host-weight-runtime-root /a",
            {{"--host-weights-root", "/b"}},
            {},
            "--host-weight-runtime-root /a and --host-weights-root /b say different things"},
        Row{"AllGather of nothing",
            "--dlo-use-allgather",
            {},
            {},
            "--dlo-use-allgather does nothing without --enable-distributed-layerwise-offload; add "
            "it, or use --transfer allgather"},
        Row{"rank-local of nothing",
            "--dlo-no-use-allgather",
            {},
            {},
            "use --transfer rank-local"}));

}  // namespace
}  // namespace dlo
