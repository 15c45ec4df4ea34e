#include "runtime/cuda/nccl_communicator.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "runtime/cuda/cuda_status.h"

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 19, 0)
#error "NCCL 2.19 or newer is needed: non-blocking communicators and ncclMemAlloc"
#endif

namespace dlo {
namespace {

using Kind = CollectiveOp::Kind;

// How long a healthy communicator may take to wind down, and an aborted one's kernels to end.
constexpr absl::Duration kCloseTimeout = absl::Seconds(10);
// Polls without giving up the processor at first, as a block's gather takes about that long.
constexpr absl::Duration kSpin = absl::Microseconds(200);
constexpr std::chrono::microseconds kPollInterval{50};

bool IsError(ncclResult_t result) { return result != ncclSuccess && result != ncclInProgress; }

absl::Status FromNccl(ncclResult_t result, ncclComm_t communicator, absl::string_view what) {
  if (!IsError(result)) return absl::OkStatus();
  std::string message = absl::StrCat(what, ": NCCL: ", ncclGetErrorString(result));
  if (const char* last = ncclGetLastError(communicator); last != nullptr && last[0] != '\0') {
    absl::StrAppend(&message, " (", last, ")");
  }
  // Both are what the loss of a peer looks like.
  const bool lost = result == ncclRemoteError || result == ncclSystemError;
  return lost ? absl::UnavailableError(message) : absl::InternalError(message);
}

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(const GroupSpec& spec, int device)
      : Communicator(spec.name, spec.rank, spec.size, spec.operation_timeout), device_(device) {}

  ~NcclCommunicator() override {
    cudaSetDevice(device_);
    if (communicator_ != nullptr) {
      if (status().ok() && !IsError(ncclCommFinalize(communicator_)) &&
          Settle(absl::Now() + kCloseTimeout, "finalize").ok()) {
        ncclCommDestroy(communicator_);
      } else {
        ncclCommAbort(communicator_);
      }
    }
    if (scratch_ != nullptr) cudaFree(scratch_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  absl::Status Connect(const GroupSpec& spec, const std::string& id_key, RendezvousStore& store) {
    const absl::Time deadline = absl::Now() + spec.setup_timeout;
    RETURN_IF_ERROR(FromCuda(cudaSetDevice(device_), absl::StrCat("cannot use cuda:", device_)));
    RETURN_IF_ERROR(FromCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                             "cannot create a stream"));
    RETURN_IF_ERROR(FromCuda(cudaMalloc(&scratch_, sizeof(float)), "cannot allocate"));
    RETURN_IF_ERROR(FromCuda(cudaMemset(scratch_, 0, sizeof(float)), "cannot clear"));

    ncclUniqueId id;
    if (rank() == 0) {
      RETURN_IF_ERROR(FromNccl(ncclGetUniqueId(&id), nullptr, "cannot make the group's id"));
      RETURN_IF_ERROR(store.Set(id_key, std::string(id.internal, sizeof(id.internal))));
    } else {
      ASSIGN_OR_RETURN(const std::string text, store.Get(id_key, deadline));
      if (text.size() != sizeof(id.internal)) {
        return absl::InternalError(
            absl::StrCat("the group's id has ", text.size(), " bytes, not ", sizeof(id.internal)));
      }
      std::memcpy(id.internal, text.data(), text.size());
    }

    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    config.commName = name().c_str();
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
    if (spec.spare_compute) config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
#endif
    RETURN_IF_ERROR(FromNccl(ncclCommInitRankConfig(&communicator_, size(), id, rank(), &config),
                             nullptr, "cannot connect"));
    return Settle(deadline, "connecting the ranks");
  }

 private:
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  using Registration = ncclWindow_t;

  absl::Status Register(void* data, int64_t bytes, absl::Time deadline, Registration& window) {
    RETURN_IF_ERROR(FromNccl(
        ncclCommWindowRegister(communicator_, data, bytes, &window, NCCL_WIN_COLL_SYMMETRIC),
        communicator_, "cannot register a buffer"));
    return Settle(deadline, "registering a buffer");
  }
  ncclResult_t Deregister(Registration& window) {
    return ncclCommWindowDeregister(communicator_, window);
  }
#else
  using Registration = void*;

  absl::Status Register(void* data, int64_t bytes, absl::Time deadline, Registration& handle) {
    RETURN_IF_ERROR(FromNccl(ncclCommRegister(communicator_, data, bytes, &handle), communicator_,
                             "cannot register a buffer"));
    return Settle(deadline, "registering a buffer");
  }
  ncclResult_t Deregister(Registration& handle) {
    return ncclCommDeregister(communicator_, handle);
  }
#endif

  absl::StatusOr<DeviceBuffer> Allocate(int64_t bytes, absl::Time deadline) override {
    RETURN_IF_ERROR(FromCuda(cudaSetDevice(device_), absl::StrCat("cannot use cuda:", device_)));
    void* data = nullptr;
    const ncclResult_t result = ncclMemAlloc(&data, std::max<int64_t>(bytes, 1));
    if (result != ncclSuccess) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "cannot allocate ", bytes, " bytes on cuda:", device_, ": ", ncclGetErrorString(result)));
    }
    // NCCL writes the handle later than the call returns: it must not move.
    auto registration = std::make_shared<Registration>();
    if (absl::Status status = Register(data, bytes, deadline, *registration); !status.ok()) {
      ncclMemFree(data);
      return status;
    }
    return DeviceBuffer(
        static_cast<std::byte*>(data), bytes,
        [this, registration](std::byte* released, int64_t) { Release(released, *registration); });
  }

  void Release(void* data, Registration& registration) {
    cudaSetDevice(device_);
    // An aborted communicator has dropped its registrations.
    if (communicator_ != nullptr && !IsError(Deregister(registration))) {
      (void)Settle(absl::Now() + kCloseTimeout, "deregistering a buffer");
    }
    ncclMemFree(data);
  }

  // Polls `done` (which may fail) between looks at NCCL's error state, Abort and the deadline.
  template <typename Done>
  absl::Status Poll(absl::Time deadline, absl::string_view what, Done done) {
    const absl::Time begin = absl::Now();
    while (true) {
      ncclResult_t state = ncclSuccess;
      RETURN_IF_ERROR(FromNccl(ncclCommGetAsyncError(communicator_, &state), communicator_, what));
      RETURN_IF_ERROR(FromNccl(state, communicator_, what));
      ASSIGN_OR_RETURN(const bool is_done, done(state));
      if (is_done) return absl::OkStatus();
      if (interrupted_.load(std::memory_order_acquire)) return absl::AbortedError("interrupted");
      const absl::Time now = absl::Now();
      if (now >= deadline) {
        return absl::DeadlineExceededError(absl::StrCat(what, " did not end by the deadline"));
      }
      if (now - begin > kSpin) std::this_thread::sleep_for(kPollInterval);
    }
  }

  // Until NCCL has taken in what it was last told.
  absl::Status Settle(absl::Time deadline, absl::string_view what) {
    return Poll(deadline, what,
                [](ncclResult_t state) -> absl::StatusOr<bool> { return state != ncclInProgress; });
  }

  absl::Status AwaitStream(absl::Time deadline) {
    return Poll(deadline, "the device", [this](ncclResult_t state) -> absl::StatusOr<bool> {
      if (state == ncclInProgress) return false;
      const cudaError_t error = cudaStreamQuery(stream_);
      if (error == cudaErrorNotReady) {
        cudaGetLastError();
        return false;
      }
      RETURN_IF_ERROR(FromCuda(error, "the device"));
      return true;
    });
  }

  ncclResult_t Enqueue(const CollectiveOp& op) {
    [[maybe_unused]] const auto grouped = [](auto body) {
      ncclResult_t result = ncclGroupStart();
      if (!IsError(result)) result = body();
      const ncclResult_t end = ncclGroupEnd();
      return IsError(result) ? result : end;
    };
    switch (op.kind) {
      case Kind::kAllGather:
        return ncclAllGather(op.send, op.recv, op.send_bytes, ncclInt8, communicator_, stream_);
      case Kind::kAllToAll:
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
        return ncclAlltoAll(op.send, op.recv, op.send_bytes, ncclInt8, communicator_, stream_);
#else
        return grouped([&] {
          ncclResult_t result = ncclSuccess;
          for (int peer = 0; peer < size() && !IsError(result); ++peer) {
            result = ncclSend(op.send + peer * op.send_bytes, op.send_bytes, ncclInt8, peer,
                              communicator_, stream_);
            if (IsError(result)) break;
            result = ncclRecv(op.recv + peer * op.recv_bytes, op.recv_bytes, ncclInt8, peer,
                              communicator_, stream_);
          }
          return result;
        });
#endif
      case Kind::kAllReduceSum:
        return ncclAllReduce(op.send, op.recv, op.send_bytes / DTypeBytes(op.dtype),
                             op.dtype == DType::kF32 ? ncclFloat32 : ncclBfloat16, ncclSum,
                             communicator_, stream_);
      case Kind::kBroadcast:
        return ncclBroadcast(op.send, op.recv, op.send_bytes, ncclInt8, op.from, communicator_,
                             stream_);
      case Kind::kSendRecv:
        return grouped([&] {
          ncclResult_t result = ncclSuccess;
          if (op.to != kNoPeer) {
            result = ncclSend(op.send, op.send_bytes, ncclInt8, op.to, communicator_, stream_);
          }
          if (op.from != kNoPeer && !IsError(result)) {
            result = ncclRecv(op.recv, op.recv_bytes, ncclInt8, op.from, communicator_, stream_);
          }
          return result;
        });
      case Kind::kBarrier:
        return ncclAllReduce(scratch_, scratch_, 1, ncclFloat32, ncclSum, communicator_, stream_);
      case Kind::kAllocateBuffer:
        break;  // not enqueued
    }
    return ncclInvalidArgument;
  }

  absl::Status Run(const CollectiveOp& op) override {
    RETURN_IF_ERROR(FromCuda(cudaSetDevice(device_), absl::StrCat("cannot use cuda:", device_)));
    RETURN_IF_ERROR(FromNccl(Enqueue(op), communicator_, "cannot start"));
    const absl::Status status = AwaitStream(op.deadline);
    const int only = size() == 2 ? 1 - rank() : kNoPeer;
    if (!status.ok() && only != kNoPeer && status.code() != absl::StatusCode::kAborted) {
      return PeerError(status.code(), {only},
                       absl::StrCat("with peer ", only, ": ", status.message()));
    }
    return status;
  }

  void Interrupt() override { interrupted_.store(true, std::memory_order_release); }

  void Close() override {
    if (communicator_ == nullptr) return;
    cudaSetDevice(device_);
    ncclCommAbort(communicator_);
    communicator_ = nullptr;
    // Abort tells kernels to end; the caller's buffers are free once they have.
    const absl::Time deadline = absl::Now() + kCloseTimeout;
    while (cudaStreamQuery(stream_) == cudaErrorNotReady && absl::Now() < deadline) {
      std::this_thread::sleep_for(kPollInterval);
    }
    cudaGetLastError();
  }

  const int device_;
  cudaStream_t stream_ = nullptr;
  float* scratch_ = nullptr;  // one element on the device, for Barrier
  ncclComm_t communicator_ = nullptr;
  std::atomic<bool> interrupted_ = false;
};

class NcclFactory : public CommunicatorFactory {
 public:
  NcclFactory(RendezvousStore* store, const NcclOptions& options)
      : store_(store), options_(options) {}

  absl::StatusOr<std::unique_ptr<Communicator>> Create(const GroupSpec& spec) override {
    RETURN_IF_ERROR(CheckGroupSpec(spec));
    auto communicator = std::make_unique<NcclCommunicator>(spec, options_.device);
    const absl::Status connected = communicator->Connect(
        spec, absl::StrCat(options_.prefix, "/", spec.name, "/nccl_id"), *store_);
    if (!connected.ok()) {
      // Marks it, so that its destructor aborts instead of waiting for the others.
      communicator->Abort("setup failed");
      return absl::Status(connected.code(),
                          absl::StrCat("rank ", spec.rank, " of group \"", spec.name, "\" (",
                                       spec.size, " ranks), setup: ", connected.message()));
    }
    return communicator;
  }

 private:
  RendezvousStore* const store_;
  const NcclOptions options_;
};

}  // namespace
}  // namespace dlo

extern "C" __attribute__((visibility("default"))) dlo::CommunicatorFactory* dlo_nccl_open(
    dlo::RendezvousStore* store, const dlo::NcclOptions* options, std::string* error) {
  int count = 0;
  if (cudaError_t result = cudaGetDeviceCount(&count); result != cudaSuccess) {
    *error = absl::StrCat("no CUDA device can be used: ", cudaGetErrorString(result));
    return nullptr;
  }
  if (options->device < 0 || options->device >= count) {
    *error = absl::StrCat("there is no cuda:", options->device, "; this machine has ", count);
    return nullptr;
  }
  return new dlo::NcclFactory(store, *options);
}
