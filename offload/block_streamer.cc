#include "offload/block_streamer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace dlo {
namespace {

absl::Status CheckBlocks(const std::vector<std::vector<HostBlock>>& rings) {
  for (size_t r = 0; r < rings.size(); ++r) {
    for (size_t b = 0; b < rings[r].size(); ++b) {
      const HostBlock& block = rings[r][b];
      const std::string name = absl::StrCat("block ", b, " of ring ", r);
      if (block.layout.total_bytes() == 0) {
        return absl::InvalidArgumentError(absl::StrCat(name, " has no bytes to stream"));
      }
      if ((block.bytes == nullptr) == block.pieces.empty()) {
        return absl::InvalidArgumentError(absl::StrCat(name, " must have either bytes or pieces"));
      }
      for (const PackPiece& piece : block.pieces) {
        if (piece.offset < 0 || piece.bytes < 0 ||
            piece.offset + piece.bytes > block.layout.total_bytes()) {
          return absl::InvalidArgumentError(absl::StrCat(name, " has a piece outside its ",
                                                         block.layout.total_bytes(), " bytes"));
        }
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<BlockStreamer>> BlockStreamer::Create(
    Device& device, std::vector<std::vector<HostBlock>> rings, const StreamerOptions& options,
    Communicator* communicator) {
  if (options.slots < 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "offload.slots is ", options.slots, "; at least 2 are needed to fetch while computing"));
  }
  bool staged = false, any = false;
  for (const auto& ring : rings) {
    any = any || !ring.empty();
    for (const HostBlock& block : ring) staged = staged || !block.pieces.empty();
  }
  if (!any) return absl::InvalidArgumentError("there is no block to stream");
  if (staged && communicator != nullptr) {
    return absl::InvalidArgumentError("shards are gathered from memory of their own, not staged");
  }
  RETURN_IF_ERROR(CheckBlocks(rings));
  auto streamer = std::unique_ptr<BlockStreamer>(
      new BlockStreamer(device, std::move(rings), options, communicator));
  streamer->staged_ = staged;
  RETURN_IF_ERROR(streamer->Allocate(options.slots));
  return streamer;
}

BlockStreamer::BlockStreamer(Device& device, std::vector<std::vector<HostBlock>> rings,
                             const StreamerOptions& options, Communicator* communicator)
    : device_(device),
      rings_(std::move(rings)),
      communicator_(communicator),
      recorder_(options.recorder),
      compute_stream_(device.compute_stream()) {}

absl::Status BlockStreamer::Allocate(int slots) {
  int64_t packed_bytes = 0;  // of the largest block that is
  for (const auto& ring : rings_) {
    for (const HostBlock& block : ring) {
      if (!block.pieces.empty()) packed_bytes = std::max(packed_bytes, block.layout.total_bytes());
      shard_bytes_ = std::max(shard_bytes_, block.layout.shard_bytes(group_size()));
    }
  }
  slot_bytes_ = shard_bytes_ * group_size();
  for (int i = 0; i < slots; ++i) {
    delivered_.push_back(device_.CreateEvent());
    released_.push_back(device_.CreateEvent());
  }
  if (communicator_ != nullptr || staged_) {
    fill_stream_ = device_.CreateStream(staged_ ? "pack" : "copy");
    for (int64_t i = 0; i < kIntakeBuffers; ++i) {
      filled_.push_back(device_.CreateEvent());
      if (!staged_) continue;
      ASSIGN_OR_RETURN(std::unique_ptr<HostBuffer> buffer, device_.AllocateHost(packed_bytes));
      staging_buffers_.push_back(std::move(buffer));
    }
  }
  deliver_stream_ = device_.CreateStream(communicator_ != nullptr ? "gather" : "copy");
  return AllocateOnDevice();
}

absl::Status BlockStreamer::AllocateOnDevice() {
  std::vector<DeviceBuffer> slots, shard_buffers;
  for (int64_t i = 0; i < num_slots(); ++i) {
    ASSIGN_OR_RETURN(DeviceBuffer slot, device_.Allocate(slot_bytes_));
    slots.push_back(std::move(slot));
  }
  for (int64_t i = 0; i < num_shard_buffers(); ++i) {
    ASSIGN_OR_RETURN(DeviceBuffer buffer, device_.Allocate(shard_bytes_));
    shard_buffers.push_back(std::move(buffer));
  }
  slots_ = std::move(slots);
  shard_buffers_ = std::move(shard_buffers);
  return absl::OkStatus();
}

BlockStreamer::~BlockStreamer() {
  // Buffers go only when nothing writes to them any more.
  ResetStreams();
}

void BlockStreamer::ResetStreams() {
  if (fill_stream_ != nullptr) fill_stream_->Reset();
  if (deliver_stream_ != nullptr) deliver_stream_->Reset();
  compute_stream_.Reset();
}

absl::Status BlockStreamer::Stop() {
  if (leased_) return absl::FailedPreconditionError("a block is still leased");
  ResetStreams();
  cursor_.reset();
  slots_.clear();
  shard_buffers_.clear();
  return absl::OkStatus();
}

absl::Status BlockStreamer::Start(VisitPlan plan) {
  if (leased_) return absl::FailedPreconditionError("a plan cannot start while a block is leased");
  bool fits = plan.ring_sizes().size() == rings_.size();
  for (size_t r = 0; fits && r < rings_.size(); ++r) {
    fits = plan.ring_sizes()[r] == static_cast<int64_t>(rings_[r].size());
  }
  if (!fits) {
    return absl::InvalidArgumentError(
        absl::StrCat("the plan ", plan.digest(), " is not for the rings streamed here"));
  }
  ResetStreams();
  if (slots_.empty()) RETURN_IF_ERROR(AllocateOnDevice());

  plan_ = std::move(plan);
  cursor_ = fill_ = deliver_ = plan_.begin();
  visit_.store(0, std::memory_order_relaxed);
  stats_ = {};
  return broken_ = Advance(-1);
}

absl::StatusOr<BlockLease> BlockStreamer::Acquire(int ring) {
  RETURN_IF_ERROR(broken_);
  if (leased_) return absl::FailedPreconditionError("the block before is still leased");
  if (!cursor_ || cursor_->done()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "block of ring ", ring, " asked for after the end of the plan ", plan_.digest()));
  }
  if (cursor_->ring() != ring) {
    return absl::FailedPreconditionError(
        absl::StrCat("block of ring ", ring, " asked for where the plan ", plan_.digest(),
                     " has ring ", cursor_->ring(), " at visit ", cursor_->visit()));
  }
  const int64_t slot = cursor_->visit() % num_slots();
  if (recorder_ != nullptr) {
    recorder_->SetVisit(cursor_->visit() + 1);
    visit_token_ = recorder_->Begin(FlightOp::kVisit);
  }
  absl::Status status = Advance(cursor_->visit());
  if (status.ok()) status = compute_stream_.Wait(*delivered_[slot]);
  if (!status.ok()) {
    broken_ = absl::Status(status.code(),
                           absl::StrCat("block ", cursor_->block(), " of ring ", ring, " (visit ",
                                        cursor_->visit(), "): ", status.message()));
    if (recorder_ != nullptr) recorder_->End(visit_token_, /*ok=*/false);
    return broken_;
  }
  leased_ = true;
  ++stats_.visits;
  BlockLease lease(cursor_->block(), &At(*cursor_).layout, slots_[slot].data(), this);
  return lease;
}

void BlockStreamer::Release() {
  leased_ = false;
  absl::Status status = compute_stream_.Record(*released_[cursor_->visit() % num_slots()]);
  if (recorder_ != nullptr) recorder_->End(visit_token_, status.ok());
  if (!status.ok()) broken_ = std::move(status);
  cursor_->Next();
  visit_.store(cursor_->visit(), std::memory_order_relaxed);
}

absl::Status BlockStreamer::Finish() {
  RETURN_IF_ERROR(broken_);
  while (cursor_ && !cursor_->done()) RETURN_IF_ERROR(Acquire(cursor_->ring()).status());
  return absl::OkStatus();
}

absl::Status BlockStreamer::Advance(int64_t v) {
  const int64_t last_deliver = v + num_slots() - 1;
  while (!deliver_->done() && deliver_->visit() <= last_deliver) {
    // fill(u) waits for delivered(u - 2), so fills run exactly one visit ahead of the deliveries
    // that were enqueued.
    while (fill_stream_ != nullptr && !fill_->done() && fill_->visit() <= deliver_->visit() + 1) {
      RETURN_IF_ERROR(Fill(*fill_));
      fill_->Next();
    }
    RETURN_IF_ERROR(Deliver(*deliver_));
    deliver_->Next();
  }
  return absl::OkStatus();
}

absl::Status BlockStreamer::Fill(const VisitPlan::Cursor& cursor) {
  const int64_t v = cursor.visit(), buffer = v % kIntakeBuffers;
  const HostBlock& block = At(cursor);
  if (v >= kIntakeBuffers) {
    RETURN_IF_ERROR(fill_stream_->Wait(*delivered_[(v - kIntakeBuffers) % num_slots()]));
  }
  if (staged_) {
    // A block that has no pieces is delivered from where it lies.
    if (block.pieces.empty()) return fill_stream_->Record(*filled_[buffer]);
    RETURN_IF_ERROR(fill_stream_->Pack(staging_buffers_[buffer]->data(), block.pieces));
    for (const PackPiece& piece : block.pieces) stats_.packed_bytes += piece.bytes;
  } else {
    const int64_t bytes = block.layout.shard_bytes(group_size());
    RETURN_IF_ERROR(fill_stream_->CopyFromHost(shard_buffers_[buffer].data(), block.bytes, bytes));
    stats_.bus_bytes += bytes;
  }
  return fill_stream_->Record(*filled_[buffer]);
}

absl::Status BlockStreamer::Deliver(const VisitPlan::Cursor& cursor) {
  const int64_t v = cursor.visit(), slot = v % num_slots();
  const HostBlock& block = At(cursor);
  if (fill_stream_ != nullptr) RETURN_IF_ERROR(deliver_stream_->Wait(*filled_[v % kIntakeBuffers]));
  if (v >= num_slots()) RETURN_IF_ERROR(deliver_stream_->Wait(*released_[slot]));
  std::byte* to = slots_[slot].data();
  if (communicator_ != nullptr) {
    const int64_t bytes = block.layout.shard_bytes(group_size());
    RETURN_IF_ERROR(deliver_stream_->AllGather(
        *communicator_, shard_buffers_[v % kIntakeBuffers].data(), to, bytes));
    stats_.fabric_bytes += bytes * (group_size() - 1);
  } else {
    const std::byte* from =
        block.pieces.empty() ? block.bytes : staging_buffers_[v % kIntakeBuffers]->data();
    RETURN_IF_ERROR(deliver_stream_->CopyFromHost(to, from, block.layout.total_bytes()));
    stats_.bus_bytes += block.layout.total_bytes();
  }
  return deliver_stream_->Record(*delivered_[slot]);
}

int64_t BlockStreamer::staging_bytes() const {
  int64_t bytes = 0;
  for (const auto& buffer : staging_buffers_) bytes += buffer->bytes();
  return bytes;
}

}  // namespace dlo
