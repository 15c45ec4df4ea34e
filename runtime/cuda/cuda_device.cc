// Device memory on a CUDA GPU. Links libtorch_cuda so that opening this library also registers
// libtorch's CUDA kernels.
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/status_macros.h"
#include "runtime/cuda/cuda_entry.h"
#include "runtime/cuda/cuda_status.h"
#include "runtime/cuda/cuda_stream.h"
#include "runtime/pinned_memory.h"

namespace dlo {
namespace {

class PinnedBuffer : public HostBuffer {
 public:
  // `released` hears of the end.
  PinnedBuffer(std::unique_ptr<PinnedMemory> memory, std::function<void(int64_t)> released)
      : memory_(std::move(memory)), released_(std::move(released)) {}
  ~PinnedBuffer() override { released_(bytes()); }
  std::byte* data() const override { return memory_->data(); }
  int64_t bytes() const override { return memory_->bytes(); }

 private:
  const std::unique_ptr<PinnedMemory> memory_;
  const std::function<void(int64_t)> released_;
};

PinCalls RegistrationCalls() {
  return {
      .pin =
          [](std::byte* data, int64_t bytes) {
            return FromCuda(cudaHostRegister(data, bytes, cudaHostRegisterDefault),
                            "cudaHostRegister");
          },
      .unpin =
          [](std::byte* data) { return FromCuda(cudaHostUnregister(data), "cudaHostUnregister"); }};
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

  absl::StatusOr<std::unique_ptr<HostBuffer>> AllocateHost(int64_t bytes) override {
    RETURN_IF_ERROR(Select());
    ASSIGN_OR_RETURN(std::unique_ptr<PinnedMemory> memory,
                     PinnedMemory::Allocate(bytes, RegistrationCalls()));
    const auto add = [this](int64_t change) {
      absl::MutexLock lock(&mutex_);
      memory_.host_bytes += change;
    };
    add(bytes);
    return std::make_unique<PinnedBuffer>(std::move(memory),
                                          [add](int64_t released) { add(-released); });
  }

  std::unique_ptr<Stream> CreateStream(const std::string& name) override {
    return MakeCudaThreadStream(name, index_);
  }
  std::unique_ptr<Event> CreateEvent() override {
    (void)Select();
    return MakeCudaEvent();
  }
  std::unique_ptr<Stamp> CreateStamp() override {
    (void)Select();
    return MakeCudaStamp();
  }
  Stream& compute_stream() override { return *compute_stream_; }

  absl::Status Synchronize() override {
    RETURN_IF_ERROR(Select());
    return FromCuda(cudaDeviceSynchronize(), "synchronize");
  }

  // Buffers do not change while libtorch computes, so the peaks add up.
  DeviceMemory memory() const override {
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto torch =
        c10::cuda::CUDACachingAllocator::getDeviceStats(static_cast<c10::DeviceIndex>(index_))
            .allocated_bytes[kAll];
    absl::MutexLock lock(&mutex_);
    return {.used_bytes = memory_.used_bytes + torch.current,
            .peak_bytes = memory_.peak_bytes + torch.peak,
            .buffer_bytes = memory_.used_bytes,
            .host_bytes = memory_.host_bytes};
  }

  void ResetPeak() override {
    c10::cuda::CUDACachingAllocator::resetPeakStats(static_cast<c10::DeviceIndex>(index_));
    absl::MutexLock lock(&mutex_);
    memory_.peak_bytes = memory_.used_bytes;
  }

 private:
  absl::Status Select() { return FromCuda(cudaSetDevice(index_), "select the device"); }

  const int index_;
  const std::unique_ptr<Stream> compute_stream_ = MakeCudaComputeStream();
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
  // libtorch does so at its first tensor; memory() is asked before that, and would throw.
  c10::cuda::CUDACachingAllocator::init(count);
  return new dlo::CudaDevice(index);
}
