// Opens libdlo_cuda.so on demand.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "runtime/device.h"

namespace dlo {

// The CUDA device with that ordinal. FAILED_PRECONDITION names what is missing: the library (built
// only where a CUDA toolkit is), one of its own libraries, the driver, or the device.
absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(int index);

}  // namespace dlo
