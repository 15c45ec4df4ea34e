#include <ATen/ATen.h>

#include <filesystem>
#include <fstream>

#include "gtest/gtest.h"
#include "models/schedulers/flow_schedule.h"
#include "models/schedulers/flow_solver.h"
#include "nlohmann/json.hpp"

namespace dlo {
namespace {

nlohmann::json Goldens() {
  std::ifstream in(std::filesystem::path(DLO_SOURCE_DIR) /
                   "tests/goldens/components/schedulers.json");
  return nlohmann::json::parse(in);
}

FlowSchedulerConfig Config(const std::string& solver, double shift) {
  FlowSchedulerConfig config;
  config.shift = shift;
  if (solver == "unipc-legacy") config.grid = SigmaGrid::kUniPCLegacy;
  if (solver == "euler") config.grid = SigmaGrid::kEuler;
  if (solver == "euler-native") config.grid = SigmaGrid::kEulerNative;
  if (solver.starts_with("euler")) config.solver = FlowSchedulerConfig::Solver::kEuler;
  return config;
}

TEST(FlowSchedule, EqualsDiffusersForEveryGrid) {
  const nlohmann::json goldens = Goldens();
  ASSERT_GE(goldens["grids"].size(), 100u);
  for (const auto& golden : goldens["grids"]) {
    const std::string solver = golden["solver"];
    const int steps = golden["steps"];
    const double shift = golden["shift"];
    const FlowSchedule schedule = MakeFlowSchedule(Config(solver, shift).grid, shift, steps, 1000);
    const std::string what = solver + " " + std::to_string(shift) + " " + std::to_string(steps);
    ASSERT_EQ(schedule.sigmas.size(), golden["sigmas"].size()) << what;
    ASSERT_EQ(schedule.timesteps.size(), golden["timesteps"].size()) << what;
    for (size_t i = 0; i < schedule.sigmas.size(); ++i) {
      EXPECT_NEAR(schedule.sigmas[i], golden["sigmas"][i].get<double>(), 2e-7)
          << what << " at " << i;
    }
    for (size_t i = 0; i < schedule.timesteps.size(); ++i) {
      // Integers for UniPC: a wrong truncation is an error of 1.
      EXPECT_NEAR(schedule.timesteps[i], golden["timesteps"][i].get<double>(), 2e-4)
          << what << " at " << i;
    }
  }
}

// Values of ../shared/reference/models.md, section 7, that do not come from our golden script.
TEST(FlowSchedule, HasThePublishedTimesteps) {
  EXPECT_EQ(MakeFlowSchedule(SigmaGrid::kUniPC, 12, 4, 1000).timesteps,
            (std::vector<float>{999, 973, 923, 800}));
  EXPECT_EQ(MakeFlowSchedule(SigmaGrid::kUniPCLegacy, 3, 10, 1000).timesteps,
            (std::vector<float>{999, 963, 922, 874, 817, 749, 666, 562, 428, 249}));
  const auto euler = MakeFlowSchedule(SigmaGrid::kEuler, 7, 2, 1000);
  EXPECT_NEAR(euler.sigmas[1], 0.0467557, 1e-6);
}

TEST(FlowSolver, TracesEqualDiffusers) {
  const nlohmann::json goldens = Goldens();
  const std::vector<float> start = goldens["start"];
  ASSERT_GE(goldens["traces"].size(), 50u);
  for (const auto& golden : goldens["traces"]) {
    FlowSchedulerConfig config = Config(golden["solver"], golden["shift"]);
    config.solver_order = golden.value("solver_order", 2);
    config.disable_corrector = golden.value("disable_corrector", std::vector<int>());
    const int steps = golden["steps"];
    const bool bf16 = golden["velocity_dtype"] == "bfloat16";
    const auto solver = MakeFlowSolver(config, steps);
    at::Tensor x = at::tensor(start);
    for (int i = 0; i < steps; ++i) {
      // The golden script's velocity field.
      const at::Tensor f = x.to(at::kFloat);
      at::Tensor v = f * 0.5 + at::sin(f * 3) * 0.25 + 0.001 * solver->schedule().timesteps[i];
      if (bf16) v = v.to(at::kBFloat16);
      x = solver->Step(v, x);
      const std::vector<float> expected = golden["samples"][i];
      const double error = (x.to(at::kFloat) - at::tensor(expected)).abs().max().item<double>();
      // In bfloat16 a last-bit difference of the float32 sample can flip one rounding of values up
      // to 2.
      EXPECT_LT(error, bf16 ? 1.6e-2 : 2e-5)
          << golden["solver"] << " shift " << golden["shift"] << " step " << i << " of " << steps
          << (bf16 ? " bf16" : "");
    }
    EXPECT_EQ(x.scalar_type(), golden["sample_dtype"] == "bfloat16" ? at::kBFloat16 : at::kFloat);
  }
}

}  // namespace
}  // namespace dlo
