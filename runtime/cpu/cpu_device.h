// Device memory on the host: page-aligned anonymous memory, accounted.
#pragma once

#include <memory>

#include "runtime/device.h"

namespace dlo {

std::unique_ptr<Device> MakeCpuDevice(int index);

}  // namespace dlo
