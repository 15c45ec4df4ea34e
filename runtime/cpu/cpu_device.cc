#include "runtime/cpu/cpu_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace dlo {
namespace {

class CpuHostBuffer : public HostBuffer {
 public:
  explicit CpuHostBuffer(DeviceBuffer memory) : memory_(std::move(memory)) {}
  std::byte* data() const override { return memory_.data(); }
  int64_t bytes() const override { return memory_.bytes(); }

 private:
  const DeviceBuffer memory_;
};

absl::StatusOr<std::byte*> MapAnonymous(int64_t bytes) {
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("a buffer of ", bytes, " bytes"));
  void* data = mmap(nullptr, std::max<int64_t>(bytes, 1), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot allocate ", bytes, " bytes: ", std::strerror(errno)));
  }
  return static_cast<std::byte*>(data);
}

void Unmap(std::byte* data, int64_t bytes) { munmap(data, std::max<int64_t>(bytes, 1)); }

class CpuDevice : public Device {
 public:
  CpuDevice(int index, CpuDeviceHooks hooks) : index_(index), hooks_(std::move(hooks)) {}

  DeviceKind kind() const override { return DeviceKind::kCpu; }
  int index() const override { return index_; }

  absl::StatusOr<DeviceBuffer> Allocate(int64_t bytes) override {
    if (hooks_.allocate) RETURN_IF_ERROR(hooks_.allocate(bytes));
    ASSIGN_OR_RETURN(std::byte* const data, MapAnonymous(bytes));
    const std::lock_guard lock(mutex_);
    memory_.used_bytes += bytes;
    memory_.peak_bytes = std::max(memory_.peak_bytes, memory_.used_bytes);
    return DeviceBuffer(data, bytes, [this](std::byte* released, int64_t size) {
      Unmap(released, size);
      const std::lock_guard release_lock(mutex_);
      memory_.used_bytes -= size;
    });
  }

  absl::StatusOr<std::unique_ptr<HostBuffer>> AllocateHost(int64_t bytes) override {
    if (hooks_.allocate_host) RETURN_IF_ERROR(hooks_.allocate_host(bytes));
    ASSIGN_OR_RETURN(std::byte* const data, MapAnonymous(bytes));
    const std::lock_guard lock(mutex_);
    memory_.host_bytes += bytes;
    return std::make_unique<CpuHostBuffer>(
        DeviceBuffer(data, bytes, [this](std::byte* released, int64_t size) {
          Unmap(released, size);
          const std::lock_guard release_lock(mutex_);
          memory_.host_bytes -= size;
        }));
  }

  std::unique_ptr<Stream> CreateStream(const std::string& name) override {
    return MakeThreadStream(name, hooks_.moves);
  }
  std::unique_ptr<Event> CreateEvent() override { return MakeCpuEvent(); }
  std::unique_ptr<Stamp> CreateStamp() override { return MakeCpuStamp(); }
  Stream& compute_stream() override { return *compute_stream_; }

  absl::Status CopyFromHost(std::byte* device, const std::byte* host, int64_t bytes) override {
    std::memcpy(device, host, bytes);
    return absl::OkStatus();
  }

  absl::Status Synchronize() override { return absl::OkStatus(); }

  DeviceMemory memory() const override {
    const std::lock_guard lock(mutex_);
    DeviceMemory memory = memory_;
    memory.buffer_bytes = memory.used_bytes;
    return memory;
  }

  void ResetPeak() override {
    const std::lock_guard lock(mutex_);
    memory_.peak_bytes = memory_.used_bytes;
  }

 private:
  const int index_;
  const CpuDeviceHooks hooks_;
  const std::unique_ptr<Stream> compute_stream_ = MakeInlineStream();
  // std::mutex rather than absl's: ThreadSanitizer sees through it although Abseil is not built
  // with it.
  mutable std::mutex mutex_;
  DeviceMemory memory_;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<Device> MakeCpuDevice(int index, CpuDeviceHooks hooks) {
  return std::make_unique<CpuDevice>(index, std::move(hooks));
}

}  // namespace dlo
