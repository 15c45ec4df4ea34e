#include "runtime/cpu/cpu_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

namespace dlo {
namespace {

class CpuDevice : public Device {
 public:
  explicit CpuDevice(int index) : index_(index) {}

  DeviceKind kind() const override { return DeviceKind::kCpu; }
  int index() const override { return index_; }

  absl::StatusOr<DeviceBuffer> Allocate(int64_t bytes) override {
    if (bytes < 0) {
      return absl::InvalidArgumentError(absl::StrCat("a buffer of ", bytes, " bytes"));
    }
    const size_t mapped = std::max<int64_t>(bytes, 1);
    void* data = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrCat("cannot allocate ", bytes, " bytes (",
                                                       memory().used_bytes,
                                                       " in use): ", std::strerror(errno)));
    }
    {
      absl::MutexLock lock(&mutex_);
      memory_.used_bytes += bytes;
      memory_.peak_bytes = std::max(memory_.peak_bytes, memory_.used_bytes);
    }
    return DeviceBuffer(static_cast<std::byte*>(data), bytes,
                        [this, mapped](std::byte* released, int64_t size) {
                          munmap(released, mapped);
                          absl::MutexLock lock(&mutex_);
                          memory_.used_bytes -= size;
                        });
  }

  absl::Status CopyFromHost(std::byte* device, const std::byte* host, int64_t bytes) override {
    std::memcpy(device, host, bytes);
    return absl::OkStatus();
  }

  absl::Status Synchronize() override { return absl::OkStatus(); }

  DeviceMemory memory() const override {
    absl::MutexLock lock(&mutex_);
    return memory_;
  }

  void ResetPeak() override {
    absl::MutexLock lock(&mutex_);
    memory_.peak_bytes = memory_.used_bytes;
  }

 private:
  const int index_;
  mutable absl::Mutex mutex_;
  DeviceMemory memory_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<Device> MakeCpuDevice(int index) { return std::make_unique<CpuDevice>(index); }

}  // namespace dlo
