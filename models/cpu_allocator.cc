#include "models/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <atomic>
#include <cstring>

namespace dlo {
namespace {

// In front of each block; keeps libtorch's alignment.
constexpr size_t kHeaderBytes = c10::gAlignment;

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    void* block = c10::alloc_cpu(bytes + kHeaderBytes);
    std::memcpy(block, &bytes, sizeof(bytes));
    const int64_t used = used_.fetch_add(static_cast<int64_t>(bytes)) + static_cast<int64_t>(bytes);
    int64_t peak = peak_.load();
    while (used > peak && !peak_.compare_exchange_weak(peak, used)) {
    }
    void* data = static_cast<std::byte*>(block) + kHeaderBytes;
    return {data, data, &Free, c10::Device(c10::kCPU)};
  }

  // oneDNN's scratch memory is allocated and freed by its bare pointer.
  c10::DeleterFnPtr raw_deleter() const override { return &Free; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  DeviceMemory memory() const { return {.used_bytes = used_.load(), .peak_bytes = peak_.load()}; }
  void ResetPeak() { peak_.store(used_.load()); }

 private:
  static void Free(void* data);

  std::atomic<int64_t> used_ = 0;
  std::atomic<int64_t> peak_ = 0;
};

// libtorch keeps a bare pointer to it until the process ends.
CountingAllocator& Instance() {
  static auto* const allocator = new CountingAllocator;
  return *allocator;
}

void CountingAllocator::Free(void* data) {
  if (data == nullptr) return;
  void* block = static_cast<std::byte*>(data) - kHeaderBytes;
  size_t bytes = 0;
  std::memcpy(&bytes, block, sizeof(bytes));
  Instance().used_.fetch_sub(static_cast<int64_t>(bytes));
  c10::free_cpu(block);
}

}  // namespace

void CountCpuTensors() { c10::SetCPUAllocator(&Instance(), /*priority=*/1); }

DeviceMemory CpuTensorMemory() { return Instance().memory(); }

void ResetCpuTensorPeak() { Instance().ResetPeak(); }

}  // namespace dlo
