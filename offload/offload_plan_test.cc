#include "offload/offload_plan.h"

#include <functional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dlo {
namespace {

TensorSpec Tensor(const std::string& name, int block) {
  return {.name = name, .shape = {4}, .block = block};
}

OffloadPlan Good() {
  return {{{.name = "text_encoder",
            .specs = {Tensor("a", 0), Tensor("b", 1), Tensor("norm", -1)},
            .ring = 0,
            .stage = ComponentStage::kText},
           {.name = "transformer", .specs = {Tensor("a", 0)}, .ring = 1},
           {.name = "vae", .specs = {Tensor("a", -1)}, .stage = ComponentStage::kDecode}}};
}
const std::vector<std::string> kComponents = {"text_encoder", "transformer", "vae"};

TEST(OffloadPlan, AGoodOnePasses) {
  const absl::Status status = CheckOffloadPlan(Good(), kComponents);
  EXPECT_TRUE(status.ok()) << status;
}

struct Flaw {
  std::function<void(OffloadPlan&)> make;
  const char* told;
};
class OffloadPlanFlaws : public testing::TestWithParam<Flaw> {};

TEST_P(OffloadPlanFlaws, AreRefusedByName) {
  OffloadPlan plan = Good();
  GetParam().make(plan);
  const absl::Status status = CheckOffloadPlan(plan, kComponents);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr(GetParam().told));
}

INSTANTIATE_TEST_SUITE_P(
    All, OffloadPlanFlaws,
    testing::Values(
        Flaw{[](OffloadPlan& plan) { plan.components[1].name = std::string("vae"); },
             "component \"vae\": is named twice"},
        Flaw{[](OffloadPlan& plan) { plan.components.pop_back(); },
             "component \"vae\": has no lifecycle"},
        Flaw{[](OffloadPlan& plan) { plan.components[1].name = std::string("unet"); },
             "component \"unet\": is not of the model"},
        Flaw{[](OffloadPlan& plan) { plan.components[1].ring = 0; }, "another component's too"},
        Flaw{[](OffloadPlan& plan) { plan.components[1].ring = 2; }, "without a gap"},
        Flaw{[](OffloadPlan& plan) { plan.components[0].specs[1].block = 2; },
             "its blocks are 0, 2"},
        Flaw{[](OffloadPlan& plan) { plan.components[0].specs[1].name = std::string("a"); },
             "tensor a is named twice"},
        Flaw{[](OffloadPlan& plan) { plan.components[2].ring = 2; }, "has no blocks to stream"}));

TEST(FitResidentBlocks, FillsWhatTheOthersLeave) {
  // Blocks of 256 bytes and 256 bytes outside them.
  OffloadPlan plan = {{{.name = "transformer",
                        .specs = {Tensor("a", 0), Tensor("b", 1), Tensor("c", 2), Tensor("o", -1)},
                        .ring = 0}}};
  const auto fit = [&](int64_t limit) { return FitResidentBlocks(plan, 100, /*slots=*/2, limit); };
  const int64_t others = 2 * 256 + 256 + 100;
  EXPECT_EQ(fit(0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(fit(others - 1).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(*fit(others), 0);
  EXPECT_EQ(*fit(others + 2 * 256 - 1), 1);
  EXPECT_EQ(*fit(others + 2 * 256), 2);
  EXPECT_EQ(*fit(others + 100 * 256), 3);
}

}  // namespace
}  // namespace dlo
