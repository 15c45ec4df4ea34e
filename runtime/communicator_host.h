// Collectives on host memory, built from sending and receiving between two ranks.
//
//   class MyTransport : public Transport { ... };
//   auto communicator = std::make_unique<HostCommunicator>(spec, std::make_unique<MyTransport>());
//
// Every pair of ranks exchanges its part directly, so that an error knows its peer, Abort wakes
// what waits, and no buffer is in use after a call. Beside its bytes, each rank tells a peer the
// operation, sequence number and sizes, and the bytes travel under a tag made from these: ranks
// that are out of step fail with INTERNAL and both operations, and bytes are never taken for those
// of another operation or size.
//
// Thread-safety and errors as in runtime/communicator.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "runtime/communicator.h"

namespace dlo {

// One message on its way. Its memory is free again once it is destroyed, whatever Wait returned.
class Transfer {
 public:
  virtual ~Transfer() = default;

  // OK when all bytes have moved; DEADLINE_EXCEEDED; UNAVAILABLE if the peer is gone; ABORTED after
  // Interrupt. A deadline in the past only looks. Not called again after OK.
  virtual absl::Status Wait(absl::Time deadline) = 0;
};

// Messages between two ranks, matched by tag (from 0 to 2^31 - 1) and, with equal tags, by order.
// Sizes must match too. All but Interrupt on one thread.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual absl::StatusOr<std::unique_ptr<Transfer>> Send(int peer, uint32_t tag,
                                                         const std::byte* data, int64_t bytes) = 0;
  virtual absl::StatusOr<std::unique_ptr<Transfer>> Receive(int peer, uint32_t tag, std::byte* data,
                                                            int64_t bytes) = 0;

  // Every Wait and every new message fails with ABORTED from now on.
  virtual void Interrupt() = 0;

  // Peers find this rank gone. There are no transfers then.
  virtual void Close() = 0;
};

class HostCommunicator : public Communicator {
 public:
  // Called on the thread of an operation before it starts; an error fails the operation.
  using Hook = std::function<absl::Status(const CollectiveOp&)>;

  HostCommunicator(const GroupSpec& spec, std::unique_ptr<Transport> transport, Hook hook = {});

 private:
  struct Leg;

  absl::Status Run(const CollectiveOp& op) override;
  void Interrupt() override { transport_->Interrupt(); }
  void Close() override { transport_->Close(); }

  absl::Status Exchange(const CollectiveOp& op, int phase, std::vector<Leg>& legs);
  absl::Status ExchangeAll(const CollectiveOp& op, int phase, std::vector<Leg>& legs);
  absl::Status AllReduce(const CollectiveOp& op);

  const std::unique_ptr<Transport> transport_;
  const Hook hook_;
};

}  // namespace dlo
