// An exception of libtorch inside a forward, at any operation of it: the request fails, memory goes
// back to what it was, and the next request is whole.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "models/wan/wan_pipeline.h"
#include "models/wan/wan_pipeline_testing.h"

namespace dlo {
namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// Counts the operations of the threads that ask for it, and throws at one of them.
struct OperationCounter {
  int64_t count = 0;
  int64_t throw_at = -1;
};
thread_local OperationCounter operations;

void CountAndCall(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TORCH_CHECK(operations.count++ != operations.throw_at, "thrown by a test in ",
              op.operator_name().name);
  const c10::impl::ExcludeDispatchKeyGuard once(kKey);
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&CountAndCall>());
}

class ThrowingForward : public testing::TestWithParam<int> {
 protected:
  // 0: resident.
  ThrowingForward() {
    auto pipeline =
        LoadWanPipeline({.root = root_, .dtype = DType::kF32, .stream_slots = GetParam()});
    EXPECT_TRUE(pipeline.ok()) << pipeline.status();
    pipeline_ = *std::move(pipeline);
  }

  absl::Status Generate(Recorder& recorder, int64_t throw_at = -1) {
    operations = {.throw_at = throw_at};
    const c10::impl::IncludeDispatchKeyGuard counting(kKey);
    return pipeline_->Generate(request_, recorder).status();
  }

  const std::filesystem::path root_ = RepositoryOf("wan22-a14b");
  const VideoRequest request_ = SmallRequest(root_);
  std::unique_ptr<VideoPipeline> pipeline_;
};

TEST_P(ThrowingForward, FailsItsRequestAndNoOther) {
  Recorder expected;
  ASSERT_TRUE(Generate(expected).ok());
  const int64_t num_operations = operations.count;
  ASSERT_GT(num_operations, 1000);
  const int64_t idle_bytes = pipeline_->memory().used_bytes;
  // Operations of every block of each expert and of the text encoder are among them: a step that
  // shares no factor with what a block takes wanders through all places of a block.
  const int64_t stride = num_operations / 97 | 1;
  int in_denoising = 0;
  for (int64_t at = 0; at < num_operations; at += stride) {
    SCOPED_TRACE(absl::StrCat("operation ", at, " of ", num_operations));
    Recorder failed;
    const absl::Status status = Generate(failed, at);
    failed.chunks.clear();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("thrown by a test in"));
    EXPECT_EQ(pipeline_->memory().used_bytes, idle_bytes);
    in_denoising += !failed.stages.empty() && failed.stages.back() == Stage::kDenoising;
    if (at % 5 != 0) continue;
    Recorder next;
    ASSERT_TRUE(Generate(next).ok());
    EXPECT_TRUE(at::equal(next.video(), expected.video()));
  }
  EXPECT_GT(in_denoising, 10);
  Recorder last;
  ASSERT_TRUE(Generate(last).ok());
  EXPECT_TRUE(at::equal(last.video(), expected.video()));
}

INSTANTIATE_TEST_SUITE_P(Slots, ThrowingForward, testing::Values(0, 2, 3),
                         [](const auto& info) { return absl::StrCat(info.param, "Slots"); });

}  // namespace
}  // namespace dlo
