#include "runtime/sim/sim_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "runtime/communicator.h"

namespace dlo {
namespace {

struct SimEvent : Event {
  absl::Duration time = -absl::InfiniteDuration();  // never recorded: does not hold anybody up
};

struct SimStamp : Stamp {
  absl::Duration Since(const Stamp& earlier) const override {
    return time - static_cast<const SimStamp&>(earlier).time;
  }
  absl::Duration time;
};

// Addresses without memory: whatever touches them dies.
absl::StatusOr<std::byte*> Reserve(int64_t bytes) {
  void* data = mmap(nullptr, std::max<int64_t>(bytes, 1), PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot reserve ", bytes, " bytes"));
  }
  return static_cast<std::byte*>(data);
}

class SimHostBuffer : public HostBuffer {
 public:
  // `in_use` counts it.
  SimHostBuffer(std::byte* data, int64_t bytes, int64_t* in_use)
      : data_(data), bytes_(bytes), in_use_(in_use) {
    *in_use_ += bytes_;
  }
  ~SimHostBuffer() override {
    munmap(data_, std::max<int64_t>(bytes_, 1));
    *in_use_ -= bytes_;
  }
  std::byte* data() const override { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  std::byte* const data_;
  const int64_t bytes_;
  int64_t* const in_use_;
};

}  // namespace

SimCost BytesPerSecond(double bandwidth, absl::Duration latency) {
  return [bandwidth, latency](int64_t bytes) {
    return latency + absl::Seconds(static_cast<double>(bytes) / bandwidth);
  };
}

class SimDevice::SimStream : public Stream {
 public:
  explicit SimStream(const SimRates& rates) : rates_(rates) {}

  absl::Status CopyFromHost(std::byte*, const std::byte*, int64_t bytes) override {
    return Take(rates_.copy(bytes));
  }
  absl::Status Pack(std::byte*, absl::Span<const PackPiece> pieces) override {
    int64_t bytes = 0;
    for (const PackPiece& piece : pieces) bytes += piece.bytes;
    return Take(rates_.pack(bytes));
  }
  absl::Status AllGather(Communicator& communicator, const std::byte*, std::byte*,
                         int64_t shard_bytes) override {
    return Take(rates_.gather(shard_bytes * (communicator.size() - 1)));
  }
  absl::Status Record(Event& event) override {
    static_cast<SimEvent&>(event).time = now_;
    return absl::OkStatus();
  }
  absl::Status Wait(const Event& event) override {
    const absl::Duration until = std::max(now_, static_cast<const SimEvent&>(event).time);
    stalled_ += until - now_;
    now_ = until;
    return absl::OkStatus();
  }
  absl::Status Mark(Stamp& stamp) override {
    static_cast<SimStamp&>(stamp).time = now_;
    return absl::OkStatus();
  }
  absl::Status Synchronize() override { return absl::OkStatus(); }
  void Reset() override {}

  absl::Status Take(absl::Duration duration) {
    now_ += duration;
    return absl::OkStatus();
  }
  absl::Duration now() const { return now_; }
  absl::Duration stalled() const { return stalled_; }

 private:
  const SimRates& rates_;
  absl::Duration now_;
  absl::Duration stalled_;
};

SimDevice::SimDevice(SimRates rates)
    : rates_(std::move(rates)), compute_(std::make_unique<SimStream>(rates_)) {}

SimDevice::~SimDevice() = default;

void SimDevice::Compute(absl::Duration duration) { (void)compute_->Take(duration); }
absl::Duration SimDevice::now() const { return compute_->now(); }
absl::Duration SimDevice::stalled() const { return compute_->stalled(); }

absl::StatusOr<DeviceBuffer> SimDevice::Allocate(int64_t bytes) {
  ASSIGN_OR_RETURN(std::byte* const data, Reserve(bytes));
  memory_.used_bytes += bytes;
  memory_.peak_bytes = std::max(memory_.peak_bytes, memory_.used_bytes);
  return DeviceBuffer(data, bytes, [this](std::byte* released, int64_t size) {
    munmap(released, std::max<int64_t>(size, 1));
    memory_.used_bytes -= size;
  });
}

absl::StatusOr<std::unique_ptr<HostBuffer>> SimDevice::AllocateHost(int64_t bytes) {
  ASSIGN_OR_RETURN(std::byte* const data, Reserve(bytes));
  return std::make_unique<SimHostBuffer>(data, bytes, &memory_.host_bytes);
}

std::unique_ptr<Stream> SimDevice::CreateStream(const std::string&) {
  return std::make_unique<SimStream>(rates_);
}
std::unique_ptr<Event> SimDevice::CreateEvent() { return std::make_unique<SimEvent>(); }
std::unique_ptr<Stamp> SimDevice::CreateStamp() { return std::make_unique<SimStamp>(); }
Stream& SimDevice::compute_stream() { return *compute_; }

absl::Status SimDevice::CopyFromHost(std::byte*, const std::byte*, int64_t bytes) {
  return compute_->Take(rates_.copy(bytes));
}

}  // namespace dlo
