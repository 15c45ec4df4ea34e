#include "models/component_weights.h"

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/checkpoint.h"
#include "models/wan/wan_config.h"
#include "models/wan/wan_weight_needs.h"
#include "runtime/cpu/cpu_device.h"

namespace dlo {
namespace {

using Kind = WeightPlacement::Kind;

// The demo model's transformer on a device whose allocations fail from the n-th on.
class ShortOfMemory : public testing::Test {
 protected:
  ShortOfMemory() {
    const auto root = std::filesystem::path(DLO_SOURCE_DIR) / "assets/shapes";
    auto config = ReadWanConfig(root);
    EXPECT_TRUE(config.ok()) << config.status();
    for (ComponentNeeds& needs : WanWeightNeeds(*config, DType::kBF16)) {
      if (needs.name == "transformer") needs_ = std::move(needs);
    }
    auto checkpoint = Checkpoint::Open(root / needs_.folder);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    checkpoint_ = std::make_unique<Checkpoint>(*std::move(checkpoint));
    const auto fail = [](int* left, absl::string_view what) {
      return [left, what](int64_t bytes) -> absl::Status {
        if ((*left)-- > 0) return absl::OkStatus();
        return absl::ResourceExhaustedError(absl::StrCat("no room for ", bytes, " bytes ", what));
      };
    };
    device_ = MakeCpuDevice(0, {.allocate = fail(&device_left_, "on the device"),
                                .allocate_host = fail(&host_left_, "to pin")});
  }

  absl::StatusOr<ComponentWeights> Load(const WeightPlacement& placement) {
    return ComponentWeights::Load(*checkpoint_, needs_.specs, *device_,
                                  {.ignore_unexpected = needs_.ignore_unexpected}, placement);
  }
  // Until `attempt` succeeds, with one more allocation each time.
  int FailUntilItSucceeds(int* left, const std::function<absl::Status()>& attempt,
                          absl::string_view what) {
    for (int n = 0; n < 1000; ++n) {
      *left = n;
      const int64_t used_bytes = device_->memory().used_bytes;
      const int64_t host_bytes = device_->memory().host_bytes;
      const absl::Status status = attempt();
      if (status.ok()) {
        *left = 1000;
        return n;
      }
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr(std::string(what)));
      EXPECT_EQ(device_->memory().used_bytes, used_bytes) << "after allocation " << n;
      EXPECT_EQ(device_->memory().host_bytes, host_bytes) << "after allocation " << n;
    }
    return -1;
  }

  ComponentNeeds needs_;
  std::unique_ptr<Checkpoint> checkpoint_;
  int device_left_ = 1000;
  int host_left_ = 1000;
  std::unique_ptr<Device> device_;
};

TEST_F(ShortOfMemory, PinningThatFailsAtAnyBlockLeavesNothingBehind) {
  for (int shards : {1, 2}) {
    std::optional<ComponentWeights> weights;
    const int buffers = FailUntilItSucceeds(
        &host_left_,
        [&]() -> absl::Status {
          auto loaded = Load({.kind = Kind::kStreamed, .shard = shards - 1, .shards = shards});
          if (!loaded.ok()) return loaded.status();
          weights = *std::move(loaded);
          return absl::OkStatus();
        },
        "to pin");
    EXPECT_GT(buffers, 4);
    ASSERT_TRUE(weights);
    EXPECT_EQ(static_cast<int>(weights->host_blocks().size()) + 1, buffers);
    EXPECT_GT(device_->memory().host_bytes, 0);
    EXPECT_EQ(device_->memory().used_bytes, 0);
    weights.reset();
    EXPECT_EQ(device_->memory().host_bytes, 0);
  }
}

TEST_F(ShortOfMemory, AResidentModelThatDoesNotFitLeavesNothingBehind) {
  const int buffers = FailUntilItSucceeds(
      &device_left_, [&] { return Load({.kind = Kind::kResident}).status(); }, "on the device");
  EXPECT_GT(buffers, 4);
  EXPECT_EQ(device_->memory().used_bytes, 0);
}

TEST_F(ShortOfMemory, WhatCannotBeBroughtInStaysOutAndCanBeLater) {
  for (const WeightPlacement& placement :
       {WeightPlacement{.kind = Kind::kStaged},
        WeightPlacement{.kind = Kind::kStreamed, .resident_blocks = 3}}) {
    auto weights = Load(placement);
    ASSERT_TRUE(weights.ok()) << weights.status();
    EXPECT_GT(
        FailUntilItSucceeds(&device_left_, [&] { return weights->BringIn(); }, "on the device"), 3);
    EXPECT_GT(device_->memory().used_bytes, 0);
    EXPECT_EQ(weights->tensor("proj_out.bias").dim(), 1);
    weights->PutOut();
    EXPECT_EQ(device_->memory().used_bytes, 0);
  }
}

}  // namespace
}  // namespace dlo
