#include "runtime/cuda/cuda_stream.h"

#include <ATen/cuda/CUDAContext.h>
#include <cuda_runtime_api.h>

#include <atomic>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "runtime/communicator.h"
#include "runtime/cuda/cuda_status.h"
#include "runtime/operation_stream.h"

namespace dlo {
namespace {

using Kind = StreamOperation::Kind;

// Without timing, which is what waits need. Reached, in the ticket's sense, once its record has
// been enqueued on the device.
class CudaEvent : public TicketEvent {
 public:
  CudaEvent() { created_ = cudaEventCreateWithFlags(&event_, cudaEventDisableTiming); }
  ~CudaEvent() override {
    if (created_ == cudaSuccess) cudaEventDestroy(event_);
  }
  cudaError_t created() const { return created_; }
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
  cudaError_t created_;
};

// An event with timing.
class CudaStamp : public Stamp {
 public:
  CudaStamp() { created_ = cudaEventCreate(&event_); }
  ~CudaStamp() override {
    if (created_ == cudaSuccess) cudaEventDestroy(event_);
  }
  // At Mark.
  void Expect() { expected_.store(true, std::memory_order_relaxed); }
  // When its record has been enqueued, or will not be.
  void Reach() {
    expected_.store(false, std::memory_order_release);
    expected_.notify_all();
  }
  absl::Duration Since(const Stamp& earlier) const override {
    const auto& begin = static_cast<const CudaStamp&>(earlier);
    begin.expected_.wait(true, std::memory_order_acquire);
    expected_.wait(true, std::memory_order_acquire);
    float ms = 0;
    cudaError_t result = cudaEventSynchronize(begin.event_);
    if (result == cudaSuccess) result = cudaEventSynchronize(event_);
    if (result == cudaSuccess) result = cudaEventElapsedTime(&ms, begin.event_, event_);
    if (result != cudaSuccess) cudaGetLastError();
    return absl::Milliseconds(static_cast<double>(ms));
  }
  cudaError_t created() const { return created_; }
  cudaEvent_t get() const { return event_; }

 private:
  std::atomic<bool> expected_ = false;
  cudaEvent_t event_ = nullptr;
  cudaError_t created_;
};

// The part of an operation that is the device's.
absl::Status Enqueue(const StreamOperation& op, cudaStream_t stream) {
  switch (op.kind) {
    case Kind::kCopy:
      return FromCuda(cudaMemcpyAsync(op.to, op.from, op.bytes, cudaMemcpyHostToDevice, stream),
                      "copy to the device");
    case Kind::kRecord: {
      const auto& event = static_cast<const CudaEvent&>(*op.record);
      RETURN_IF_ERROR(FromCuda(event.created(), "create an event"));
      return FromCuda(cudaEventRecord(event.get(), stream), "record an event");
    }
    case Kind::kWait:
      return FromCuda(cudaStreamWaitEvent(stream, static_cast<const CudaEvent&>(*op.wait).get(), 0),
                      "wait for an event");
    case Kind::kMark: {
      const auto& stamp = static_cast<const CudaStamp&>(*op.stamp);
      RETURN_IF_ERROR(FromCuda(stamp.created(), "create a stamp"));
      return FromCuda(cudaEventRecord(stamp.get(), stream), "mark a moment");
    }
    case Kind::kPack:
    case Kind::kAllGather:
      break;
  }
  return absl::UnimplementedError("packing and gathering are the work of a host thread");
}

// Whoever waits for a record or a stamp hears of it in any state.
absl::Status Perform(const StreamOperation& op, cudaStream_t stream, absl::Status status) {
  if (status.ok() && op.kind == Kind::kWait) status = op.wait->Await(op.ticket);
  if (status.ok()) status = Enqueue(op, stream);
  if (op.kind == Kind::kRecord) op.record->Reach(op.ticket, status);
  if (op.kind == Kind::kMark) static_cast<CudaStamp*>(op.stamp)->Reach();
  return status;
}

class CudaComputeStream : public OperationStream {
 public:
  absl::Status Synchronize() override {
    if (status_.ok()) {
      status_ = FromCuda(cudaStreamSynchronize(Current()), "synchronize a stream");
    }
    return status_;
  }
  void Reset() override {
    cudaStreamSynchronize(Current());
    status_ = absl::OkStatus();
  }

 private:
  static cudaStream_t Current() { return at::cuda::getCurrentCUDAStream().stream(); }

  absl::Status Submit(const StreamOperation& op) override {
    return status_ = Perform(op, Current(), status_);
  }
  void Expect(Stamp& stamp) override { static_cast<CudaStamp&>(stamp).Expect(); }

  absl::Status status_;
};

class CudaThreadStream : public OperationStream {
 public:
  CudaThreadStream(const std::string& name, int device, int capacity)
      : created_(Create(device)),
        device_(device),
        thread_(name, capacity, [this](const StreamOperation& op, const absl::Status& so_far) {
          return PerformOnThread(op, so_far);
        }) {}
  ~CudaThreadStream() override {
    thread_.Reset();
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  absl::Status Synchronize() override {
    RETURN_IF_ERROR(thread_.Synchronize());
    return FromCuda(cudaStreamSynchronize(stream_), "synchronize a stream");
  }
  void Reset() override {
    thread_.Reset();
    cudaStreamSynchronize(stream_);
  }

 private:
  absl::Status Create(int device) {
    RETURN_IF_ERROR(FromCuda(cudaSetDevice(device), "select the device"));
    return FromCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create a stream");
  }

  absl::Status Submit(const StreamOperation& op) override { return thread_.Submit(op); }
  void Expect(Stamp& stamp) override { static_cast<CudaStamp&>(stamp).Expect(); }

  absl::Status PerformOnThread(const StreamOperation& op, const absl::Status& so_far) {
    absl::Status status = so_far.ok() ? created_ : so_far;
    if (status.ok() && !selected_) {
      status = FromCuda(cudaSetDevice(device_), "select the device");
      selected_ = true;
    }
    if (op.kind != Kind::kPack && op.kind != Kind::kAllGather) {
      return Perform(op, stream_, std::move(status));
    }
    RETURN_IF_ERROR(status);
    RETURN_IF_ERROR(FromCuda(cudaStreamSynchronize(stream_), "synchronize a stream"));
    if (op.kind == Kind::kPack) return PackPieces(op.to, op.pieces);
    return op.communicator->AllGather(absl::MakeConstSpan(op.from, op.bytes),
                                      absl::MakeSpan(op.to, op.bytes * op.communicator->size()));
  }

  cudaStream_t stream_ = nullptr;
  const absl::Status created_;
  const int device_;
  bool selected_ = false;   // the thread's own
  OperationThread thread_;  // last: it uses all of the above
};

}  // namespace

std::unique_ptr<Event> MakeCudaEvent() { return std::make_unique<CudaEvent>(); }

std::unique_ptr<Stamp> MakeCudaStamp() { return std::make_unique<CudaStamp>(); }

std::unique_ptr<Stream> MakeCudaComputeStream() { return std::make_unique<CudaComputeStream>(); }

std::unique_ptr<Stream> MakeCudaThreadStream(const std::string& name, int device, int capacity) {
  return std::make_unique<CudaThreadStream>(name, device, capacity);
}

}  // namespace dlo
