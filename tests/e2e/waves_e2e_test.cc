// Requests that run together give byte for byte the videos that they give alone: the real programs
// on the demo model, with as many threads per worker in all cases.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/testing/frontend_harness.h"
#include "tests/e2e/served_group.h"

namespace dlo {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(120);
constexpr int kNumRequests = 4;

v1::GenerateRequest Request(int i) {
  static constexpr const char* kPrompts[kNumRequests] = {
      "a red circle moving right on a black background", "a green triangle moving up",
      "a blue square growing on a white background", "a yellow circle moving left"};
  v1::GenerateRequest request;
  request.set_prompt(kPrompts[i]);
  request.set_output_format(v1::OUTPUT_FORMAT_SAFETENSORS);
  request.mutable_settings()->set_width(64);
  request.mutable_settings()->set_height(64);
  request.mutable_settings()->set_num_frames(9);
  request.mutable_settings()->set_num_inference_steps(6);
  request.mutable_settings()->set_seed(100 + i);
  return request;
}

// In waves of as many as there are ranks.
std::vector<std::string> Videos(int dp, const std::string& transfer) {
  std::vector<std::string> videos;
  auto group = ServedGroup::Create({.dp = dp, .transfer = transfer});
  EXPECT_TRUE(group.ok()) << group.status();
  if (!group.ok()) return videos;
  const absl::Status started = (*group)->Start();
  EXPECT_TRUE(started.ok()) << started;
  for (int first = 0; first < kNumRequests; first += dp) {
    // Nobody denoises before all do.
    (*group)->Forget("denoising");
    (*group)->Arm("denoising", "hold");
    std::vector<std::unique_ptr<TestCall>> calls;
    for (int i = first; i < first + dp; ++i) {
      calls.push_back(std::make_unique<TestCall>((*group)->channel(), Request(i), kCallTimeout));
    }
    for (int rank = 0; rank < dp; ++rank) {
      EXPECT_GT((*group)->WaitReached("denoising", rank), 0) << (*group)->Log();
    }
    (*group)->Disarm("denoising");
    std::set<int> ranks;
    for (const auto& call : calls) {
      const grpc::Status status = call->Finish();
      EXPECT_TRUE(status.ok()) << status.error_message();
      videos.push_back(call->video());
      ranks.insert(call->last_job().result().ranks(0).rank());
    }
    EXPECT_EQ(ranks.size(), static_cast<size_t>(dp));
  }
  EXPECT_TRUE((*group)->Stop().ok());
  return videos;
}

TEST(WavesOfTheDemoModel, GiveTheVideosOfSoloRuns) {
  const std::vector<std::string> alone = Videos(1, "none");
  ASSERT_EQ(alone.size(), static_cast<size_t>(kNumRequests));
  EXPECT_EQ(std::set<std::string>(alone.begin(), alone.end()).size(), alone.size());
  for (const char* transfer : {"none", "rank-local", "allgather"}) {
    for (const int dp : {2, 4}) {
      const std::vector<std::string> together = Videos(dp, transfer);
      ASSERT_EQ(together.size(), alone.size());
      for (int i = 0; i < kNumRequests; ++i) {
        EXPECT_TRUE(together[i] == alone[i])
            << "request " << i << ", dp " << dp << ", " << transfer;
      }
    }
  }
}

}  // namespace
}  // namespace dlo
