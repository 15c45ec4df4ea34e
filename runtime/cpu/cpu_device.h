// Device memory on the host: page-aligned anonymous memory, accounted.
//
//   auto device = MakeCpuDevice(0, {.allocate_host = [](int64_t) { return Fail(); }});
//
// The hooks are for tests: faults and delays where a real machine has them. Without them it is the
// device that OpenDevice opens.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "runtime/cpu/cpu_stream.h"
#include "runtime/device.h"

namespace dlo {

struct CpuDeviceHooks {
  CpuMoveHooks moves;  // of the streams that have a thread
  // Before an allocation; an error fails it.
  std::function<absl::Status(int64_t bytes)> allocate;
  std::function<absl::Status(int64_t bytes)> allocate_host;
};

std::unique_ptr<Device> MakeCpuDevice(int index, CpuDeviceHooks hooks = {});

}  // namespace dlo
