#include "runtime/communicator.h"

#include <sys/mman.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

namespace dlo {
namespace {

constexpr char kPeersPayload[] = "dlo.collective.peers";

using Kind = CollectiveOp::Kind;

FlightOp ToFlightOp(Kind kind) {
  static_assert(static_cast<int>(FlightOp::kAllocateBuffer) -
                    static_cast<int>(FlightOp::kAllGather) ==
                static_cast<int>(Kind::kAllocateBuffer));
  return static_cast<FlightOp>(static_cast<int>(FlightOp::kAllGather) + static_cast<int>(kind));
}

absl::Status WithMessage(const absl::Status& status, absl::string_view message) {
  absl::Status result(status.code(), message);
  status.ForEachPayload([&result](absl::string_view url, const absl::Cord& payload) {
    result.SetPayload(url, payload);
  });
  return result;
}

}  // namespace

absl::string_view CollectiveName(Kind kind) {
  switch (kind) {
    case Kind::kAllGather:
      return "AllGather";
    case Kind::kAllToAll:
      return "AllToAll";
    case Kind::kAllReduceSum:
      return "AllReduceSum";
    case Kind::kBroadcast:
      return "Broadcast";
    case Kind::kSendRecv:
      return "SendRecv";
    case Kind::kBarrier:
      return "Barrier";
    case Kind::kAllocateBuffer:
      return "AllocateBuffer";
  }
  return "unknown operation";
}

absl::Status PeerError(absl::StatusCode code, absl::Span<const int> peers,
                       absl::string_view message) {
  absl::Status status(code, message);
  if (!peers.empty()) status.SetPayload(kPeersPayload, absl::Cord(absl::StrJoin(peers, ",")));
  return status;
}

std::vector<int> PeersOfError(const absl::Status& status) {
  std::vector<int> peers;
  const auto payload = status.GetPayload(kPeersPayload);
  if (!payload.has_value()) return peers;
  const std::string text(*payload);
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    int peer = 0;
    if (absl::SimpleAtoi(part, &peer)) peers.push_back(peer);
  }
  return peers;
}

absl::Status CheckGroupSpec(const GroupSpec& spec) {
  const std::string group = absl::StrCat("group \"", spec.name, "\"");
  if (spec.name.empty()) return absl::InvalidArgumentError("a group needs a name");
  if (spec.size < 1 || spec.rank < 0 || spec.rank >= spec.size) {
    return absl::InvalidArgumentError(absl::StrCat(group, ": rank ", spec.rank, " of size ",
                                                   spec.size, "; a rank is from 0 to size - 1"));
  }
  if (spec.setup_timeout <= absl::ZeroDuration() ||
      spec.operation_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat(group, ": timeouts must be positive, but setup is ",
                     absl::FormatDuration(spec.setup_timeout), " and operation ",
                     absl::FormatDuration(spec.operation_timeout)));
  }
  return absl::OkStatus();
}

std::string Communicator::Where(Kind kind) const {
  return absl::StrCat("rank ", rank_, " of group \"", name_, "\" (", size_, " ranks), ",
                      CollectiveName(kind));
}

absl::Status Communicator::CheckPeer(Kind kind, absl::string_view what, int peer) const {
  if (peer >= 0 && peer < size_) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(Where(kind), ": ", what, " ", peer,
                                                 " is not a rank of the group, 0 to ", size_ - 1));
}

absl::Status Communicator::AllGather(absl::Span<const std::byte> send, absl::Span<std::byte> recv,
                                     absl::Time deadline) {
  if (recv.size() != send.size() * size_) {
    return absl::InvalidArgumentError(
        absl::StrCat(Where(Kind::kAllGather), ": ", send.size(), " bytes of each rank need ",
                     send.size() * size_, " bytes to receive, but there are ", recv.size()));
  }
  return Perform({.kind = Kind::kAllGather,
                  .send = send.data(),
                  .recv = recv.data(),
                  .send_bytes = static_cast<int64_t>(send.size()),
                  .recv_bytes = static_cast<int64_t>(send.size())},
                 deadline);
}

absl::Status Communicator::AllToAll(absl::Span<const std::byte> send, absl::Span<std::byte> recv,
                                    absl::Time deadline) {
  if (recv.size() != send.size() || send.size() % size_ != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(Where(Kind::kAllToAll), ": ", send.size(), " bytes to send and ", recv.size(),
                     " to receive; they must be equal and a multiple of the group's size"));
  }
  const int64_t part = static_cast<int64_t>(send.size()) / size_;
  return Perform({.kind = Kind::kAllToAll,
                  .send = send.data(),
                  .recv = recv.data(),
                  .send_bytes = part,
                  .recv_bytes = part},
                 deadline);
}

absl::Status Communicator::AllReduceSum(absl::Span<std::byte> data, DType dtype,
                                        absl::Time deadline) {
  if (dtype != DType::kF32 && dtype != DType::kBF16) {
    return absl::InvalidArgumentError(absl::StrCat(Where(Kind::kAllReduceSum), ": dtype ",
                                                   DTypeName(dtype), " is not F32 or BF16"));
  }
  const int64_t bytes = data.size();
  if (bytes % DTypeBytes(dtype) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(Where(Kind::kAllReduceSum), ": ", bytes,
                                                   " bytes are no whole number of ",
                                                   DTypeName(dtype), " elements"));
  }
  return Perform({.kind = Kind::kAllReduceSum,
                  .send = data.data(),
                  .recv = data.data(),
                  .send_bytes = bytes,
                  .recv_bytes = bytes,
                  .dtype = dtype},
                 deadline);
}

absl::Status Communicator::Broadcast(absl::Span<std::byte> data, int root, absl::Time deadline) {
  RETURN_IF_ERROR(CheckPeer(Kind::kBroadcast, "root", root));
  const int64_t bytes = data.size();
  return Perform({.kind = Kind::kBroadcast,
                  .send = data.data(),
                  .recv = data.data(),
                  .send_bytes = bytes,
                  .recv_bytes = bytes,
                  .from = root},
                 deadline);
}

absl::Status Communicator::SendRecv(absl::Span<const std::byte> send, int to,
                                    absl::Span<std::byte> recv, int from, absl::Time deadline) {
  if (to != kNoPeer) RETURN_IF_ERROR(CheckPeer(Kind::kSendRecv, "receiver", to));
  if (from != kNoPeer) RETURN_IF_ERROR(CheckPeer(Kind::kSendRecv, "sender", from));
  if ((to == kNoPeer && !send.empty()) || (from == kNoPeer && !recv.empty())) {
    return absl::InvalidArgumentError(
        absl::StrCat(Where(Kind::kSendRecv), ": bytes without a peer to exchange them with"));
  }
  if ((to == rank_) != (from == rank_) || (to == rank_ && send.size() != recv.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat(Where(Kind::kSendRecv),
                     ": a rank that sends to itself receives the same "
                     "number of bytes from itself"));
  }
  return Perform({.kind = Kind::kSendRecv,
                  .send = send.data(),
                  .recv = recv.data(),
                  .send_bytes = static_cast<int64_t>(send.size()),
                  .recv_bytes = static_cast<int64_t>(recv.size()),
                  .to = to,
                  .from = from},
                 deadline);
}

absl::Status Communicator::Barrier(absl::Time deadline) {
  return Perform({.kind = Kind::kBarrier}, deadline);
}

absl::StatusOr<DeviceBuffer> Communicator::AllocateBuffer(int64_t bytes) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(Where(Kind::kAllocateBuffer), ": ", bytes, " bytes; a size is at least 0"));
  }
  DeviceBuffer buffer;
  RETURN_IF_ERROR(Perform({.kind = Kind::kAllocateBuffer, .recv_bytes = bytes},
                          absl::InfiniteFuture(), [&](const CollectiveOp& op) -> absl::Status {
                            ASSIGN_OR_RETURN(buffer, Allocate(bytes, op.deadline));
                            return absl::OkStatus();
                          }));
  return buffer;
}

absl::StatusOr<DeviceBuffer> Communicator::Allocate(int64_t bytes, absl::Time) {
  const size_t mapped = std::max<int64_t>(bytes, 1);
  void* data = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot allocate ", bytes, " bytes of host memory"));
  }
  return DeviceBuffer(static_cast<std::byte*>(data), bytes,
                      [mapped](std::byte* released, int64_t) { munmap(released, mapped); });
}

absl::Status Communicator::Perform(CollectiveOp op, absl::Time deadline) {
  return Perform(op, deadline, [this](const CollectiveOp& begun) { return Run(begun); });
}

absl::Status Communicator::Perform(CollectiveOp op, absl::Time deadline,
                                   const std::function<absl::Status(const CollectiveOp&)>& run) {
  op.deadline = std::min(deadline, absl::Now() + operation_timeout_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!broken_.ok()) {
      return WithMessage(absl::FailedPreconditionError(""),
                         absl::StrCat(Where(op.kind), " refused, as the communicator is broken: ",
                                      broken_.message()));
    }
    if (running_) {
      return absl::FailedPreconditionError(absl::StrCat(
          Where(op.kind), " refused: another thread is in ", CollectiveName(running_kind_), " #",
          sequence_, "; a communicator does one operation at a time"));
    }
    op.sequence = ++sequence_;
    running_ = true;
    running_kind_ = op.kind;
  }
  FlightToken token;
  if (recorder_ != nullptr) {
    token = recorder_->Begin(ToFlightOp(op.kind), recorder_group_, op.sequence,
                             op.from == kNoPeer ? op.to : op.from);
  }
  const absl::Status result = run(op);
  if (recorder_ != nullptr) recorder_->End(token, result.ok());
  bool close = false;
  absl::Status first;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    running_ = false;
    if (!result.ok() && broken_.ok()) {
      broken_ = WithMessage(
          result, absl::StrCat(Where(op.kind), " #", op.sequence, " failed: ", result.message()));
    }
    first = broken_;
    close = !broken_.ok() && !std::exchange(closed_, true);
  }
  if (close) Close();
  // An operation that was done before Abort came is done.
  return result.ok() ? absl::OkStatus() : first;
}

void Communicator::Abort(absl::string_view reason) {
  bool close = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!broken_.ok()) return;
    const std::string during =
        running_ ? absl::StrCat("in ", CollectiveName(running_kind_), " #", sequence_)
                 : absl::StrCat("after operation #", sequence_);
    broken_ = absl::AbortedError(absl::StrCat("rank ", rank_, " of group \"", name_, "\" (", size_,
                                              " ranks), aborted ", during, ": ", reason));
    close = !running_ && !std::exchange(closed_, true);
    // Under the lock, so that an implementation is never interrupted once it is being closed.
    if (!close) Interrupt();
  }
  if (close) Close();
}

void Communicator::Record(FlightRecorder* recorder) {
  recorder_ = recorder;
  if (recorder != nullptr) recorder_group_ = recorder->AddGroup(name_);
}

absl::Status Communicator::status() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return broken_;
}

uint64_t Communicator::sequence() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return sequence_;
}

absl::StatusOr<RankCommunicators> CreateRankCommunicators(const Topology& topology, Rank rank,
                                                          WeightTransfer transfer,
                                                          const GroupTimeouts& timeouts,
                                                          CommunicatorFactory& factory,
                                                          FlightRecorder* recorder) {
  const auto create = [&](absl::string_view purpose, GroupKind kind,
                          bool spare_compute) -> absl::StatusOr<std::unique_ptr<Communicator>> {
    const std::vector<Rank> group = topology.Group(kind, rank);
    if (group.size() < 2) return nullptr;
    int index = 0;
    while (group[index] != rank) ++index;
    // The first member tells the groups of one kind apart.
    ASSIGN_OR_RETURN(std::unique_ptr<Communicator> communicator,
                     factory.Create({.name = absl::StrCat(purpose, "/", group.front().value),
                                     .rank = index,
                                     .size = static_cast<int>(group.size()),
                                     .setup_timeout = timeouts.setup,
                                     .operation_timeout = timeouts.operation,
                                     .spare_compute = spare_compute}));
    communicator->Record(recorder);
    return communicator;
  };
  RankCommunicators all;
  if (const std::optional<GroupKind> kind = topology.WeightGroup(transfer)) {
    ASSIGN_OR_RETURN(all.weights, create("weights", *kind, /*spare_compute=*/true));
  }
  const std::pair<std::unique_ptr<Communicator>*, GroupKind> others[] = {
      {&all.replica, GroupKind::kReplica}, {&all.tp, GroupKind::kTp},
      {&all.ulysses, GroupKind::kUlysses}, {&all.ring, GroupKind::kRing},
      {&all.cfg, GroupKind::kCfg},         {&all.hsdp, GroupKind::kHsdp}};
  for (const auto& [communicator, kind] : others) {
    ASSIGN_OR_RETURN(*communicator, create(GroupKindName(kind), kind, /*spare_compute=*/false));
  }
  return all;
}

}  // namespace dlo
