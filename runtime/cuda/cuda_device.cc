// Device memory on a CUDA GPU. Links libtorch_cuda so that opening this library also registers
// libtorch's CUDA kernels.
#include <ATen/cuda/CUDAContext.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/status_macros.h"
#include "runtime/cuda/cuda_entry.h"

namespace dlo {
namespace {

absl::Status FromCuda(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();  // errors that are not sticky must not surface at the next call
  const std::string message = absl::StrCat(what, ": ", cudaGetErrorString(error));
  if (error == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

class CudaDevice : public Device {
 public:
  explicit CudaDevice(int index) : index_(index) {}

  DeviceKind kind() const override { return DeviceKind::kCuda; }
  int index() const override { return index_; }

  absl::StatusOr<DeviceBuffer> Allocate(int64_t bytes) override {
    RETURN_IF_ERROR(Select());
    void* data = nullptr;
    RETURN_IF_ERROR(FromCuda(cudaMalloc(&data, std::max<int64_t>(bytes, 1)),
                             absl::StrCat("cannot allocate ", bytes, " bytes on cuda:", index_,
                                          " (", memory().used_bytes, " in use)")));
    {
      absl::MutexLock lock(&mutex_);
      memory_.used_bytes += bytes;
      memory_.peak_bytes = std::max(memory_.peak_bytes, memory_.used_bytes);
    }
    return DeviceBuffer(static_cast<std::byte*>(data), bytes,
                        [this](std::byte* released, int64_t size) {
                          cudaFree(released);
                          absl::MutexLock lock(&mutex_);
                          memory_.used_bytes -= size;
                        });
  }

  absl::Status CopyFromHost(std::byte* device, const std::byte* host, int64_t bytes) override {
    RETURN_IF_ERROR(Select());
    return FromCuda(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "copy to the device");
  }

  absl::Status Synchronize() override {
    RETURN_IF_ERROR(Select());
    return FromCuda(cudaDeviceSynchronize(), "synchronize");
  }

  DeviceMemory memory() const override {
    absl::MutexLock lock(&mutex_);
    return memory_;
  }

  void ResetPeak() override {
    absl::MutexLock lock(&mutex_);
    memory_.peak_bytes = memory_.used_bytes;
  }

 private:
  absl::Status Select() { return FromCuda(cudaSetDevice(index_), "select the device"); }

  const int index_;
  mutable absl::Mutex mutex_;
  DeviceMemory memory_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace
}  // namespace dlo

extern "C" __attribute__((visibility("default"))) dlo::Device* dlo_cuda_open(int index,
                                                                             std::string* error) {
  int count = 0;
  if (cudaError_t result = cudaGetDeviceCount(&count); result != cudaSuccess) {
    *error = absl::StrCat("no CUDA device can be used: ", cudaGetErrorString(result));
    return nullptr;
  }
  if (index < 0 || index >= count) {
    *error = absl::StrCat("there is no cuda:", index, "; this machine has ", count);
    return nullptr;
  }
  return new dlo::CudaDevice(index);
}
