// A device in virtual time: streams are clocks, moves take bytes over bandwidth, nothing is moved.
//
//   SimDevice device({.copy = BytesPerSecond(55e9), .gather = BytesPerSecond(300e9)});
//   auto streamer = BlockStreamer::Create(device, rings, options, communicator);
//   ... Acquire ...; device.Compute(absl::Milliseconds(12)); ...
//   device.now();   // when the computing so far is done
//
// The code under simulation is the one that runs on real devices, so its schedule's laws can be
// tested exactly and published timings predicted. Memory is accounted but not backed: a block's
// bytes must not be touched. One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "runtime/device.h"

namespace dlo {

// How long a move of so many bytes takes.
using SimCost = std::function<absl::Duration(int64_t bytes)>;

SimCost BytesPerSecond(double bandwidth, absl::Duration latency = absl::ZeroDuration());

struct SimRates {
  SimCost copy = BytesPerSecond(1e9);  // host to device
  SimCost gather =
      BytesPerSecond(1e9);             // of the gathered bytes a rank receives: shard * (size - 1)
  SimCost pack = BytesPerSecond(1e9);  // pages to staging buffer
};

class SimDevice : public Device {
 public:
  explicit SimDevice(SimRates rates);
  ~SimDevice() override;

  // Computing on the compute stream.
  void Compute(absl::Duration duration);

  // When everything enqueued on the compute stream so far is done, from the device's creation.
  absl::Duration now() const;

  // How long the compute stream has waited for events in all.
  absl::Duration stalled() const;

  DeviceKind kind() const override { return DeviceKind::kCpu; }
  int index() const override { return 0; }
  absl::StatusOr<DeviceBuffer> Allocate(int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<HostBuffer>> AllocateHost(int64_t bytes) override;
  std::unique_ptr<Stream> CreateStream(const std::string& name) override;
  std::unique_ptr<Event> CreateEvent() override;
  std::unique_ptr<Stamp> CreateStamp() override;
  Stream& compute_stream() override;
  absl::Status CopyFromHost(std::byte* device, const std::byte* host, int64_t bytes) override;
  absl::Status Synchronize() override { return absl::OkStatus(); }
  DeviceMemory memory() const override { return memory_; }
  void ResetPeak() override { memory_.peak_bytes = memory_.used_bytes; }

 private:
  class SimStream;

  const SimRates rates_;
  DeviceMemory memory_;
  std::unique_ptr<SimStream> compute_;
};

}  // namespace dlo
