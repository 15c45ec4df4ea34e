#include "runtime/device.h"

#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dlo {
namespace {

TEST(CpuDevice, AccountsLiveAndPeakBytes) {
  auto device = *OpenDevice(DeviceKind::kCpu, 0);
  auto a = device->Allocate(1000);
  ASSERT_TRUE(a.ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a->data()) % 4096, 0u);
  {
    auto b = device->Allocate(500);
    ASSERT_TRUE(b.ok());
    EXPECT_EQ(device->memory().used_bytes, 1500);
    EXPECT_EQ(device->memory().buffer_bytes, 1500);
  }
  EXPECT_EQ(device->memory().used_bytes, 1000);
  EXPECT_EQ(device->memory().peak_bytes, 1500);
  device->ResetPeak();
  EXPECT_EQ(device->memory().peak_bytes, 1000);
}

TEST(CpuDevice, MovedFromBufferReleasesNothing) {
  auto device = *OpenDevice(DeviceKind::kCpu, 0);
  DeviceBuffer kept;
  {
    DeviceBuffer first = *device->Allocate(64);
    kept = std::move(first);
  }
  EXPECT_EQ(device->memory().used_bytes, 64);
  kept = DeviceBuffer();
  EXPECT_EQ(device->memory().used_bytes, 0);
}

TEST(CpuDevice, AccountsHostBuffersApart) {
  auto device = *OpenDevice(DeviceKind::kCpu, 0);
  {
    auto a = device->AllocateHost(300);
    auto b = device->AllocateHost(40);
    ASSERT_TRUE(a.ok() && b.ok());
    EXPECT_EQ(device->memory().host_bytes, 340);
    EXPECT_EQ(device->memory().used_bytes, 0);
  }
  EXPECT_EQ(device->memory().host_bytes, 0);
}

TEST(CpuDevice, TooLargeABufferIsAnError) {
  auto device = *OpenDevice(DeviceKind::kCpu, 0);
  auto buffer = device->Allocate(int64_t{1} << 60);
  EXPECT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(device->memory().used_bytes, 0);
}

TEST(CpuDevice, CopiesFromHost) {
  auto device = *OpenDevice(DeviceKind::kCpu, 0);
  std::vector<std::byte> host(10, std::byte{7});
  auto buffer = device->Allocate(10);
  ASSERT_TRUE(buffer.ok());
  ASSERT_TRUE(device->CopyFromHost(buffer->data(), host.data(), 10).ok());
  EXPECT_EQ(buffer->data()[9], std::byte{7});
}

TEST(DeviceKind, NamesAreChecked) {
  EXPECT_EQ(*ParseDeviceKind("cuda"), DeviceKind::kCuda);
  EXPECT_THAT(ParseDeviceKind("gpu").status().message(), testing::HasSubstr("\"gpu\""));
}

// On a machine without a driver the error says so; on one with a GPU the device opens. Never a
// crash.
TEST(CudaDevice, OpensOrSaysWhatIsMissing) {
  auto device = OpenDevice(DeviceKind::kCuda, 0);
  if (device.ok()) {
    EXPECT_EQ((*device)->kind(), DeviceKind::kCuda);
  } else {
    EXPECT_EQ(device.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(device.status().message()), testing::ContainsRegex("cuda|CUDA"));
  }
}

}  // namespace
}  // namespace dlo
