// A device that moves nothing and writes down what it is asked to do: the program that a streamer
// submits, stream by stream, for protocol_test.cc to explore.
//
//   RecordingDevice device;
//   auto streamer = BlockStreamer::Create(device, rings, options, communicator);
//   ... Acquire; device.Use(lease.data()); ...
//   Explore(device.program());
//
// One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/communicator.h"
#include "runtime/device.h"

namespace dlo {

// What one stream does in one go: it waits, then touches memory, then the events are reached.
struct RecordedAction {
  struct Point {
    int event = 0;
    int times = 0;  // how often the event has been recorded
  };
  std::string name;  // "copy", "pack", "gather", "use"
  std::vector<Point> waits;
  int reads = -1;   // a buffer, or -1: memory that never changes
  int writes = -1;  // a buffer, or -1: none
  std::vector<Point> reached;
  // Actions of the compute stream that were submitted before this one.
  int after_compute = 0;
};

struct RecordedStream {
  std::string name;
  std::vector<RecordedAction> actions;
};

// What the streamer of one rank submitted; stream 0 computes.
struct RecordedProgram {
  std::vector<RecordedStream> streams;
  std::vector<std::string> errors;  // of the submission itself
};

class RecordingDevice : public Device {
 public:
  RecordingDevice() { program_.streams.push_back({.name = "compute", .actions = {}}); }

  const RecordedProgram& program() const { return program_; }

  // Computing that reads the buffer at `data`.
  void Use(const std::byte* data) {
    Add(0, {.name = "use", .reads = BufferAt(data)}).IgnoreError();
  }

  DeviceKind kind() const override { return DeviceKind::kCpu; }
  int index() const override { return 0; }
  absl::StatusOr<DeviceBuffer> Allocate(int64_t bytes) override {
    auto* data = static_cast<std::byte*>(std::malloc(bytes));
    buffers_[data] = static_cast<int>(buffers_.size());
    return DeviceBuffer(data, bytes, [](std::byte* released, int64_t) { std::free(released); });
  }
  absl::StatusOr<std::unique_ptr<HostBuffer>> AllocateHost(int64_t bytes) override {
    class Buffer : public HostBuffer {
     public:
      explicit Buffer(DeviceBuffer memory) : memory_(std::move(memory)) {}
      std::byte* data() const override { return memory_.data(); }
      int64_t bytes() const override { return memory_.bytes(); }

     private:
      const DeviceBuffer memory_;
    };
    return std::make_unique<Buffer>(*Allocate(bytes));
  }
  absl::Status CopyFromHost(std::byte*, const std::byte*, int64_t) override {
    return absl::UnimplementedError("only streams copy here");
  }
  std::unique_ptr<Stream> CreateStream(const std::string& name) override {
    program_.streams.push_back({.name = name, .actions = {}});
    return std::make_unique<RecordingStream>(this, static_cast<int>(program_.streams.size()) - 1);
  }
  std::unique_ptr<Event> CreateEvent() override {
    auto event = std::make_unique<RecordingEvent>();
    event->id = num_events_++;
    return event;
  }
  std::unique_ptr<Stamp> CreateStamp() override { return std::make_unique<RecordingStamp>(); }
  Stream& compute_stream() override { return compute_; }
  absl::Status Synchronize() override { return absl::OkStatus(); }
  DeviceMemory memory() const override { return {}; }
  void ResetPeak() override {}

 private:
  struct RecordingEvent : Event {
    int id = 0;
    int times = 0;
  };
  struct RecordingStamp : Stamp {
    absl::Duration Since(const Stamp&) const override { return absl::ZeroDuration(); }
  };

  class RecordingStream : public Stream {
   public:
    RecordingStream(RecordingDevice* device, int index) : device_(device), index_(index) {}
    absl::Status CopyFromHost(std::byte* to, const std::byte* from, int64_t) override {
      return device_->Add(
          index_,
          {.name = "copy", .reads = device_->BufferAt(from), .writes = device_->BufferAt(to)});
    }
    absl::Status Pack(std::byte* to, absl::Span<const PackPiece>) override {
      return device_->Add(index_, {.name = "pack", .writes = device_->BufferAt(to)});
    }
    absl::Status AllGather(Communicator&, const std::byte* from, std::byte* to, int64_t) override {
      return device_->Add(
          index_,
          {.name = "gather", .reads = device_->BufferAt(from), .writes = device_->BufferAt(to)});
    }
    absl::Status Record(Event& event) override {
      auto& own = static_cast<RecordingEvent&>(event);
      device_->program_.streams[index_].actions.back().reached.push_back({own.id, ++own.times});
      return absl::OkStatus();
    }
    absl::Status Wait(const Event& event) override {
      const auto& own = static_cast<const RecordingEvent&>(event);
      if (own.times == 0) {
        device_->program_.errors.push_back(absl::StrCat(
            device_->program_.streams[index_].name, " waits for an event before it is recorded"));
      }
      device_->waits_[index_].push_back({own.id, own.times});
      return absl::OkStatus();
    }
    absl::Status Mark(Stamp&) override { return absl::OkStatus(); }
    absl::Status Synchronize() override { return absl::OkStatus(); }
    void Reset() override {}

   private:
    RecordingDevice* const device_;
    const int index_;
  };

  absl::Status Add(int stream, RecordedAction action) {
    action.waits = std::move(waits_[stream]);
    waits_[stream].clear();
    action.after_compute = static_cast<int>(program_.streams[0].actions.size());
    program_.streams[stream].actions.push_back(std::move(action));
    return absl::OkStatus();
  }

  int BufferAt(const std::byte* data) const {
    const auto found = buffers_.find(data);
    return found == buffers_.end() ? -1 : found->second;
  }

  RecordedProgram program_;
  std::map<const std::byte*, int> buffers_;
  std::map<int, std::vector<RecordedAction::Point>> waits_;  // of each stream's next action
  int num_events_ = 0;
  RecordingStream compute_{this, 0};
};

}  // namespace dlo
