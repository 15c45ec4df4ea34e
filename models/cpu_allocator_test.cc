#include "models/cpu_allocator.h"

#include <ATen/ATen.h>

#include "gtest/gtest.h"

namespace dlo {
namespace {

TEST(CpuAllocator, CountsLiveTensorsAndTheirPeak) {
  CountCpuTensors();
  ResetCpuTensorPeak();
  const int64_t before = CpuTensorMemory().used_bytes;
  {
    const at::Tensor a = at::empty({1000}, at::kFloat);
    const at::Tensor b = at::empty({500}, at::kFloat);
    EXPECT_EQ(CpuTensorMemory().used_bytes - before, 6000);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.const_data_ptr()) % 64, 0u);
  }
  EXPECT_EQ(CpuTensorMemory().used_bytes, before);
  EXPECT_EQ(CpuTensorMemory().peak_bytes - before, 6000);
  EXPECT_EQ(at::empty({0}).numel(), 0);
}

}  // namespace
}  // namespace dlo
