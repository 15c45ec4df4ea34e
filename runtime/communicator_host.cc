#include "runtime/communicator_host.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace dlo {
namespace {

using Kind = CollectiveOp::Kind;
constexpr uint32_t kHeaderMagic = 0x444c4f31;

// What a rank says before its bytes. Ranks of a group run the same build on machines of one byte
// order.
struct Header {
  uint32_t magic = kHeaderMagic;
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kU8;
  uint16_t phase = 0;
  uint64_t sequence = 0;
  int64_t bytes = 0;  // of the message
  int32_t root = kNoPeer;
  int32_t unused = 0;

  bool operator==(const Header&) const = default;
};
static_assert(sizeof(Header) == 32 && std::is_trivially_copyable_v<Header>);

constexpr uint32_t kHeaderTag = 0;
constexpr uint32_t kReceiptTag = 1;

// Messages from this size on are acknowledged.
constexpr int64_t kReceiptBytesMin = 4096;

// Of the message that a header announces: from 2 to 2^31 - 1, the same for equal headers only (but
// for one chance in 2^31).
uint32_t PayloadTag(const Header& header) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a on words
  for (uint64_t word :
       {uint64_t(header.kind), uint64_t(header.dtype), uint64_t{header.phase}, header.sequence,
        static_cast<uint64_t>(header.bytes), static_cast<uint64_t>(header.root)}) {
    hash = (hash ^ word) * 0x100000001b3;
  }
  return static_cast<uint32_t>((hash ^ hash >> 31) % 0x7ffffffe) + 2;
}

std::string Describe(const Header& header) {
  if (header.magic != kHeaderMagic) return "bytes that are no header";
  return absl::StrCat(CollectiveName(header.kind), " #", header.sequence,
                      header.phase > 0 ? absl::StrCat(" (phase ", header.phase, ")") : "", " of ",
                      header.bytes, " bytes of ", DTypeName(header.dtype),
                      header.root == kNoPeer ? "" : absl::StrCat(" from root ", header.root));
}

// The part of `elements` that rank `rank` adds up.
std::pair<int64_t, int64_t> PartOf(int64_t elements, int rank, int size) {
  return {elements * rank / size, elements * (rank + 1) / size};
}

float FromBf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// To the nearest, ties to even; a NaN stays one.
uint16_t ToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <typename T, typename Load, typename Store>
void Sum(const std::vector<const std::byte*>& parts, std::byte* sum, int64_t elements, Load load,
         Store store) {
  for (int64_t i = 0; i < elements; ++i) {
    float total = 0;
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      T element;
      std::memcpy(&element, parts[rank] + i * sizeof(T), sizeof(T));
      total = rank == 0 ? load(element) : total + load(element);
    }
    const T stored = store(total);
    std::memcpy(sum + i * sizeof(T), &stored, sizeof(T));
  }
}

}  // namespace

// The exchange with one peer. A side of zero bytes still exchanges its header.
struct HostCommunicator::Leg {
  int peer = 0;
  bool sends = true;
  bool receives = true;
  const std::byte* send = nullptr;
  int64_t send_bytes = 0;
  std::byte* recv = nullptr;
  int64_t recv_bytes = 0;

  Header out;
  Header in;
  std::unique_ptr<Transfer> out_header;
  std::unique_ptr<Transfer> out_payload;
  std::unique_ptr<Transfer> in_header;
  std::unique_ptr<Transfer> in_payload;
  std::byte receipt{};
  std::unique_ptr<Transfer> out_receipt;
  std::unique_ptr<Transfer> in_receipt;
};

HostCommunicator::HostCommunicator(const GroupSpec& spec, std::unique_ptr<Transport> transport,
                                   Hook hook)
    : Communicator(spec.name, spec.rank, spec.size, spec.operation_timeout),
      transport_(std::move(transport)),
      hook_(std::move(hook)) {}

absl::Status HostCommunicator::Run(const CollectiveOp& op) {
  if (hook_) RETURN_IF_ERROR(hook_(op));
  std::vector<Leg> legs;
  legs.reserve(size());
  const auto add = [&](Leg leg) {
    if (leg.peer != rank()) legs.push_back(std::move(leg));
  };
  const auto keep = [](std::byte* to, const std::byte* from, int64_t bytes) {
    if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
  };
  switch (op.kind) {
    case Kind::kAllGather:
      keep(op.recv + rank() * op.recv_bytes, op.send, op.send_bytes);
      for (int peer = 0; peer < size(); ++peer) {
        add({.peer = peer,
             .send = op.send,
             .send_bytes = op.send_bytes,
             .recv = op.recv + peer * op.recv_bytes,
             .recv_bytes = op.recv_bytes});
      }
      break;
    case Kind::kAllToAll:
      keep(op.recv + rank() * op.recv_bytes, op.send + rank() * op.send_bytes, op.send_bytes);
      for (int peer = 0; peer < size(); ++peer) {
        add({.peer = peer,
             .send = op.send + peer * op.send_bytes,
             .send_bytes = op.send_bytes,
             .recv = op.recv + peer * op.recv_bytes,
             .recv_bytes = op.recv_bytes});
      }
      break;
    case Kind::kAllReduceSum:
      return AllReduce(op);
    case Kind::kBroadcast:
      for (int peer = 0; peer < size(); ++peer) {
        if (rank() == op.from) {
          add({.peer = peer, .receives = false, .send = op.send, .send_bytes = op.send_bytes});
        } else if (peer == op.from) {
          add({.peer = peer, .sends = false, .recv = op.recv, .recv_bytes = op.recv_bytes});
        }
      }
      break;
    case Kind::kSendRecv:
      if (op.to == rank()) keep(op.recv, op.send, op.send_bytes);
      if (op.to != kNoPeer) {
        add({.peer = op.to, .receives = false, .send = op.send, .send_bytes = op.send_bytes});
      }
      if (op.from != kNoPeer) {
        add({.peer = op.from, .sends = false, .recv = op.recv, .recv_bytes = op.recv_bytes});
      }
      break;
    case Kind::kBarrier:
      for (int peer = 0; peer < size(); ++peer) add({.peer = peer});
      break;
    case Kind::kAllocateBuffer:
      return absl::InternalError("AllocateBuffer is not run here");
  }
  return Exchange(op, 0, legs);
}

// Each rank adds up one part of the elements, in the order of ranks, and gives the sum to all: the
// result is the same everywhere and from run to run.
absl::Status HostCommunicator::AllReduce(const CollectiveOp& op) {
  const int64_t width = DTypeBytes(op.dtype);
  const int64_t elements = op.recv_bytes / width;
  const auto [begin, end] = PartOf(elements, rank(), size());
  const int64_t part_bytes = (end - begin) * width;
  std::vector<std::byte> received(part_bytes * (size() - 1));

  std::vector<Leg> legs;
  std::vector<const std::byte*> parts(size());
  parts[rank()] = op.send + begin * width;
  std::byte* free = received.data();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const auto [peer_begin, peer_end] = PartOf(elements, peer, size());
    legs.push_back({.peer = peer,
                    .send = op.send + peer_begin * width,
                    .send_bytes = (peer_end - peer_begin) * width,
                    .recv = free,
                    .recv_bytes = part_bytes});
    parts[peer] = free;
    free += part_bytes;
  }
  RETURN_IF_ERROR(Exchange(op, 0, legs));

  std::byte* sum = op.recv + begin * width;
  if (op.dtype == DType::kF32) {
    const auto same = [](float value) { return value; };
    Sum<float>(parts, sum, end - begin, same, same);
  } else {
    Sum<uint16_t>(parts, sum, end - begin, FromBf16, ToBf16);
  }

  legs.clear();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const auto [peer_begin, peer_end] = PartOf(elements, peer, size());
    legs.push_back({.peer = peer,
                    .send = sum,
                    .send_bytes = part_bytes,
                    .recv = op.recv + peer_begin * width,
                    .recv_bytes = (peer_end - peer_begin) * width});
  }
  return Exchange(op, 1, legs);
}

absl::Status HostCommunicator::ExchangeAll(const CollectiveOp& op, int phase,
                                           std::vector<Leg>& legs) {
  const auto header = [&](int64_t bytes) {
    return Header{.kind = op.kind,
                  .dtype = op.dtype,
                  .phase = static_cast<uint16_t>(phase),
                  .sequence = op.sequence,
                  .bytes = bytes,
                  .root = op.kind == Kind::kBroadcast ? op.from : kNoPeer};
  };
  const auto bytes_of = [](Header* message) { return reinterpret_cast<std::byte*>(message); };
  const auto wait = [&op](std::unique_ptr<Transfer>& transfer) -> absl::Status {
    if (transfer == nullptr) return absl::OkStatus();
    RETURN_IF_ERROR(transfer->Wait(op.deadline));
    transfer.reset();
    return absl::OkStatus();
  };
  // Gloo loses sight of a message that is cut off in its middle: its sender and its receiver would
  // wait until the deadline. What has not begun it reports at once. So a small message follows each
  // large one and is waited for first: to the receiver the header, to the sender a receipt.
  for (Leg& leg : legs) {
    if (leg.receives) {
      if (leg.recv_bytes > 0) {
        ASSIGN_OR_RETURN(leg.in_payload,
                         transport_->Receive(leg.peer, PayloadTag(header(leg.recv_bytes)), leg.recv,
                                             leg.recv_bytes));
      }
      ASSIGN_OR_RETURN(leg.in_header, transport_->Receive(leg.peer, kHeaderTag, bytes_of(&leg.in),
                                                          sizeof(Header)));
    }
    if (leg.sends) {
      leg.out = header(leg.send_bytes);
      if (leg.send_bytes > 0) {
        ASSIGN_OR_RETURN(leg.out_payload,
                         transport_->Send(leg.peer, PayloadTag(leg.out), leg.send, leg.send_bytes));
      }
      ASSIGN_OR_RETURN(leg.out_header,
                       transport_->Send(leg.peer, kHeaderTag, bytes_of(&leg.out), sizeof(Header)));
      if (leg.send_bytes >= kReceiptBytesMin) {
        ASSIGN_OR_RETURN(leg.in_receipt,
                         transport_->Receive(leg.peer, kReceiptTag, &leg.receipt, 1));
      }
    }
  }
  for (Leg& leg : legs) {
    if (!leg.receives) continue;
    RETURN_IF_ERROR(wait(leg.in_header));
    if (const Header expected = header(leg.recv_bytes); !(leg.in == expected)) {
      return PeerError(absl::StatusCode::kInternal, {leg.peer},
                       absl::StrCat("ranks are out of step: peer ", leg.peer, " is in ",
                                    Describe(leg.in), ", this rank in ", Describe(expected)));
    }
    RETURN_IF_ERROR(wait(leg.in_payload));
    if (leg.recv_bytes >= kReceiptBytesMin) {
      static constexpr std::byte kReceipt{1};
      ASSIGN_OR_RETURN(leg.out_receipt, transport_->Send(leg.peer, kReceiptTag, &kReceipt, 1));
    }
  }
  for (Leg& leg : legs) {
    for (std::unique_ptr<Transfer>* transfer :
         {&leg.in_receipt, &leg.out_header, &leg.out_payload, &leg.out_receipt}) {
      RETURN_IF_ERROR(wait(*transfer));
    }
  }
  return absl::OkStatus();
}

absl::Status HostCommunicator::Exchange(const CollectiveOp& op, int phase, std::vector<Leg>& legs) {
  const absl::Status first = ExchangeAll(op, phase, legs);
  if (first.ok()) return first;
  if (first.code() != absl::StatusCode::kDeadlineExceeded &&
      first.code() != absl::StatusCode::kUnavailable) {
    return first;
  }
  // The transfer that failed first may only be the first that was looked at, and its peer may have
  // given up because of another: see how it stands with each. Of peers that are only late, one that
  // has not sent is more to blame than one that has not taken what was sent to it, as that may be
  // held up itself.
  std::vector<int> gone;
  std::vector<int> silent;
  int silent_stage = 2;
  const auto note = [](std::vector<int>& peers, int peer) {
    if (std::find(peers.begin(), peers.end(), peer) == peers.end()) peers.push_back(peer);
  };
  // An error is told once, so the transfer that failed says nothing more of it.
  if (first.code() == absl::StatusCode::kUnavailable) gone = PeersOfError(first);
  for (Leg& leg : legs) {
    const std::pair<Transfer*, int> stages[] = {{leg.in_header.get(), 0},
                                                {leg.in_payload.get(), 0},
                                                {leg.in_receipt.get(), 1},
                                                {leg.out_header.get(), 1},
                                                {leg.out_payload.get(), 1}};
    for (const auto& [transfer, stage] : stages) {
      if (transfer == nullptr) continue;
      const absl::Status status = transfer->Wait(absl::InfinitePast());
      if (status.code() == absl::StatusCode::kUnavailable) note(gone, leg.peer);
      if (status.code() != absl::StatusCode::kDeadlineExceeded || stage > silent_stage) continue;
      if (stage < silent_stage) silent.clear();
      silent_stage = stage;
      note(silent, leg.peer);
    }
  }
  if (gone.empty() && silent.empty()) silent = PeersOfError(first);
  std::erase_if(silent, [&gone](int peer) {
    return std::find(gone.begin(), gone.end(), peer) != gone.end();
  });
  std::vector<std::string> parts;
  if (!gone.empty()) {
    parts.push_back(absl::StrCat("lost the connection to peer ", absl::StrJoin(gone, ", peer ")));
  }
  if (!silent.empty()) {
    parts.push_back(absl::StrCat("nothing more from peer ", absl::StrJoin(silent, ", peer "),
                                 gone.empty() ? " by the deadline" : " so far"));
  }
  return PeerError(first.code(), gone.empty() ? silent : gone,
                   absl::StrCat(absl::StrJoin(parts, "; "), " (", first.message(), ")"));
}

}  // namespace dlo
