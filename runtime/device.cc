#include "runtime/device.h"

#include "absl/strings/str_cat.h"
#include "runtime/cpu/cpu_device.h"
#include "runtime/cuda/cuda_library.h"

namespace dlo {

absl::StatusOr<DeviceKind> ParseDeviceKind(absl::string_view name) {
  if (name == "cpu") return DeviceKind::kCpu;
  if (name == "cuda") return DeviceKind::kCuda;
  return absl::InvalidArgumentError(
      absl::StrCat("device \"", name, "\" is not one of \"cpu\", \"cuda\""));
}

absl::StatusOr<std::unique_ptr<Device>> OpenDevice(DeviceKind kind, int index) {
  if (kind == DeviceKind::kCpu) return MakeCpuDevice(index);
  return OpenCudaDevice(index);
}

}  // namespace dlo
