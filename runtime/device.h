// The machine seam for memory that models compute in.
//
//   ASSIGN_OR_RETURN(std::unique_ptr<Device> device, OpenDevice(DeviceKind::kCpu, 0));
//   ASSIGN_OR_RETURN(DeviceBuffer block, device->Allocate(layout.total_bytes()));
//   RETURN_IF_ERROR(device->CopyFromHost(block.data(), host, bytes));
//
// On the CPU device memory is ordinary memory whose size is accounted as if it were a device's. The
// CUDA implementation lives in libdlo_cuda.so, opened on demand, so that a CPU process maps none of
// it.
//
// Thread-safe. A buffer must not outlive its device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/stream.h"

namespace dlo {

enum class DeviceKind { kCpu, kCuda };

// INVALID_ARGUMENT unless `name` is "cpu" or "cuda".
absl::StatusOr<DeviceKind> ParseDeviceKind(absl::string_view name);

struct DeviceMemory {
  int64_t used_bytes =
      0;  // in live buffers of this process; on CUDA with what libtorch has allocated
  int64_t peak_bytes = 0;    // the largest used_bytes since ResetPeak
  int64_t buffer_bytes = 0;  // of used_bytes: in DeviceBuffers
  int64_t host_bytes = 0;    // in live host buffers (AllocateHost)
};

// A piece of device memory, aligned to 4096 bytes. Move-only; gives its bytes back on destruction.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(std::byte* data, int64_t bytes, std::function<void(std::byte*, int64_t)> release)
      : data_(data), bytes_(bytes), release_(std::move(release)) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(release_, other.release_);
    return *this;
  }
  ~DeviceBuffer() {
    if (data_ != nullptr) release_(data_, bytes_);
  }

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  std::function<void(std::byte*, int64_t)> release_;
};

// Host memory that the device can copy from without a detour (pinned, on CUDA). Owned by whoever
// holds it; must not outlive its device.
class HostBuffer {
 public:
  virtual ~HostBuffer() = default;
  virtual std::byte* data() const = 0;
  virtual int64_t bytes() const = 0;
};

class Device {
 public:
  virtual ~Device() = default;

  virtual DeviceKind kind() const = 0;
  virtual int index() const = 0;

  // RESOURCE_EXHAUSTED with the size asked for and the size in use when the device has no room.
  virtual absl::StatusOr<DeviceBuffer> Allocate(int64_t bytes) = 0;

  // Copies `bytes` from pageable host memory and returns when they have arrived.
  virtual absl::Status CopyFromHost(std::byte* device, const std::byte* host, int64_t bytes) = 0;

  // RESOURCE_EXHAUSTED when the host has no room to pin.
  virtual absl::StatusOr<std::unique_ptr<HostBuffer>> AllocateHost(int64_t bytes) = 0;

  // Streams, events and stamps must not outlive the device. `name` shows in debuggers and traces.
  virtual std::unique_ptr<Stream> CreateStream(const std::string& name) = 0;
  virtual std::unique_ptr<Event> CreateEvent() = 0;
  virtual std::unique_ptr<Stamp> CreateStamp() = 0;
  // Where the model computes: on the CPU the calling thread, on CUDA libtorch's current stream.
  virtual Stream& compute_stream() = 0;

  // Waits for all work on the device.
  virtual absl::Status Synchronize() = 0;

  virtual DeviceMemory memory() const = 0;
  virtual void ResetPeak() = 0;
};

// FAILED_PRECONDITION, with what is missing, when the machine or the build has no such device.
absl::StatusOr<std::unique_ptr<Device>> OpenDevice(DeviceKind kind, int index);

}  // namespace dlo
