// The one function of libdlo_cuda.so that is looked up by name.
#pragma once

#include <string>

#include "runtime/device.h"

namespace dlo {

inline constexpr char kCudaOpenSymbol[] = "dlo_cuda_open";

// A new device, owned by the caller, or null with `error` set.
using CudaOpenFunction = Device* (*)(int index, std::string* error);

}  // namespace dlo
