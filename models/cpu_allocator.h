// Counts what libtorch allocates for CPU tensors, so that a CPU run can say how much device memory
// it needed.
//
//   CountCpuTensors();
//   ResetCpuTensorPeak();
//   Run();
//   int64_t peak = CpuTensorMemory().peak_bytes;
//
// The allocator is libtorch's own, with a size kept beside each block. Thread-safe; counts are of
// the whole process.
#pragma once

#include "runtime/device.h"

namespace dlo {

// From now on new CPU tensors are counted. May be called again.
void CountCpuTensors();

DeviceMemory CpuTensorMemory();
void ResetCpuTensorPeak();

}  // namespace dlo
