#include "offload/block_streamer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
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

  started_ = device_.CreateStamp();
  // A visit is filled, and thereby marked, up to slots + 1 visits before it is computed.
  marks_.resize(kVisitsUnread + slots + 2);
  for (Marks& marks : marks_) {
    for (std::unique_ptr<Stamp>* stamp :
         {&marks.fill_begin, &marks.fill_end, &marks.deliver_begin, &marks.deliver_end,
          &marks.wait_begin, &marks.compute_begin, &marks.compute_end}) {
      *stamp = device_.CreateStamp();
    }
  }
  stats_.resize(rings_.size());
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

absl::Status BlockStreamer::Start(VisitPlan plan, VisitLog* log) {
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
  if (slots_.empty()) {
    // Finish must not take it for a plan that was walked.
    broken_ = AllocateOnDevice();
    RETURN_IF_ERROR(broken_);
  }

  plan_ = std::move(plan);
  cursor_ = fill_ = deliver_ = plan_.begin();
  visit_.store(0, std::memory_order_relaxed);
  std::fill(stats_.begin(), stats_.end(), StreamerStats());
  marks_read_ = 0;
  last_wait_begin_ = absl::ZeroDuration();
  log_ = log;
  if (log_ != nullptr) log_->Clear();
  broken_ = compute_stream_.Mark(*started_);
  start_time_ = absl::Now();
  if (!broken_.ok()) return broken_;
  fill_status_ = deliver_status_ = absl::OkStatus();
  Advance(-1);
  return absl::OkStatus();
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
  const Marks& marks = MarksOf(cursor_->visit());
  Advance(cursor_->visit());
  absl::Status status = deliver_->visit() > cursor_->visit() ? absl::OkStatus() : deliver_status_;
  if (status.ok()) status = compute_stream_.Mark(*marks.wait_begin);
  if (status.ok()) status = compute_stream_.Wait(*delivered_[slot]);
  if (status.ok()) status = compute_stream_.Mark(*marks.compute_begin);
  if (!status.ok()) {
    if (recorder_ != nullptr) recorder_->End(visit_token_, /*ok=*/false);
    return Break(*cursor_, status);
  }
  leased_ = true;
  ++stats_[ring].visits;
  BlockLease lease(cursor_->block(), &At(*cursor_).layout, slots_[slot].data(), this);
  return lease;
}

void BlockStreamer::Release() {
  leased_ = false;
  const int64_t v = cursor_->visit();
  absl::Status status = compute_stream_.Mark(*MarksOf(v).compute_end);
  if (status.ok()) status = compute_stream_.Record(*released_[v % num_slots()]);
  if (recorder_ != nullptr) recorder_->End(visit_token_, status.ok());
  if (!status.ok()) Break(*cursor_, status).IgnoreError();
  cursor_->Next();
  visit_.store(cursor_->visit(), std::memory_order_relaxed);
  ReadMarks(v + 1 - kVisitsUnread);
}

absl::Status BlockStreamer::Break(const VisitPlan::Cursor& cursor, const absl::Status& cause) {
  broken_ =
      absl::Status(cause.code(), absl::StrCat("block ", cursor.block(), " of ring ", cursor.ring(),
                                              " (visit ", cursor.visit(), "): ", cause.message()));
  if (communicator_ != nullptr) communicator_->Abort(broken_.message());
  return broken_;
}

absl::Status BlockStreamer::Finish() {
  RETURN_IF_ERROR(broken_);
  while (cursor_ && !cursor_->done()) RETURN_IF_ERROR(Acquire(cursor_->ring()).status());
  return absl::OkStatus();
}

void BlockStreamer::Advance(int64_t v) {
  const int64_t last_deliver = v + num_slots() - 1;
  while (deliver_status_.ok() && !deliver_->done() && deliver_->visit() <= last_deliver) {
    // fill(u) waits for delivered(u - 2), so fills run exactly one visit ahead of the deliveries
    // that were enqueued.
    while (fill_stream_ != nullptr && fill_status_.ok() && !fill_->done() &&
           fill_->visit() <= deliver_->visit() + 1) {
      fill_status_ = Fill(*fill_);
      if (fill_status_.ok()) fill_->Next();
    }
    const bool filled = fill_stream_ == nullptr || fill_->visit() > deliver_->visit();
    deliver_status_ = filled ? Deliver(*deliver_) : fill_status_;
    if (deliver_status_.ok()) deliver_->Next();
  }
}

absl::Status BlockStreamer::Fill(const VisitPlan::Cursor& cursor) {
  const int64_t v = cursor.visit(), buffer = v % kIntakeBuffers;
  const HostBlock& block = At(cursor);
  if (v >= kIntakeBuffers) {
    RETURN_IF_ERROR(fill_stream_->Wait(*delivered_[(v - kIntakeBuffers) % num_slots()]));
  }
  Marks& marks = MarksOf(v);
  marks.ring = cursor.ring();
  marks.block = cursor.block();
  StreamerStats& stats = stats_[cursor.ring()];
  RETURN_IF_ERROR(fill_stream_->Mark(*marks.fill_begin));
  if (staged_) {
    // A block that has no pieces is delivered from where it lies.
    if (!block.pieces.empty()) {
      RETURN_IF_ERROR(fill_stream_->Pack(staging_buffers_[buffer]->data(), block.pieces));
    }
    for (const PackPiece& piece : block.pieces) stats.packed_bytes += piece.bytes;
  } else {
    const int64_t bytes = block.layout.shard_bytes(group_size());
    RETURN_IF_ERROR(fill_stream_->CopyFromHost(shard_buffers_[buffer].data(), block.bytes, bytes));
    stats.bus_bytes += bytes;
  }
  RETURN_IF_ERROR(fill_stream_->Mark(*marks.fill_end));
  return fill_stream_->Record(*filled_[buffer]);
}

absl::Status BlockStreamer::Deliver(const VisitPlan::Cursor& cursor) {
  const int64_t v = cursor.visit(), slot = v % num_slots();
  const HostBlock& block = At(cursor);
  if (fill_stream_ != nullptr) RETURN_IF_ERROR(deliver_stream_->Wait(*filled_[v % kIntakeBuffers]));
  if (v >= num_slots()) RETURN_IF_ERROR(deliver_stream_->Wait(*released_[slot]));
  std::byte* to = slots_[slot].data();
  Marks& marks = MarksOf(v);
  marks.ring = cursor.ring();
  marks.block = cursor.block();
  StreamerStats& stats = stats_[cursor.ring()];
  RETURN_IF_ERROR(deliver_stream_->Mark(*marks.deliver_begin));
  if (communicator_ != nullptr) {
    const int64_t bytes = block.layout.shard_bytes(group_size());
    RETURN_IF_ERROR(deliver_stream_->AllGather(
        *communicator_, shard_buffers_[v % kIntakeBuffers].data(), to, bytes));
    stats.fabric_bytes += bytes * (group_size() - 1);
  } else {
    const std::byte* from =
        block.pieces.empty() ? block.bytes : staging_buffers_[v % kIntakeBuffers]->data();
    RETURN_IF_ERROR(deliver_stream_->CopyFromHost(to, from, block.layout.total_bytes()));
    stats.bus_bytes += block.layout.total_bytes();
  }
  RETURN_IF_ERROR(deliver_stream_->Mark(*marks.deliver_end));
  return deliver_stream_->Record(*delivered_[slot]);
}

void BlockStreamer::ReadMarks(int64_t end) {
  for (; marks_read_ < end; ++marks_read_) {
    const Marks& marks = MarksOf(marks_read_);
    // Each visit's times start from those of the one before, so that devices whose clocks lose
    // precision over long spans stay exact.
    const Stamp& before = marks_read_ == 0 ? *started_ : *MarksOf(marks_read_ - 1).wait_begin;
    VisitTimes times{.visit = marks_read_, .ring = marks.ring, .block = marks.block};
    const auto time = [&](const Stamp& stamp) { return last_wait_begin_ + stamp.Since(before); };
    times.deliver_begin = time(*marks.deliver_begin);
    times.deliver_end = time(*marks.deliver_end);
    times.wait_begin = time(*marks.wait_begin);
    times.compute_begin = time(*marks.compute_begin);
    times.compute_end = time(*marks.compute_end);

    StreamerStats& stats = stats_[marks.ring];
    absl::Duration& deliver_time = communicator_ != nullptr ? stats.gather_time : stats.copy_time;
    absl::Duration& deliver_stall =
        communicator_ != nullptr ? stats.gather_stall : stats.copy_stall;
    deliver_time += times.deliver_end - times.deliver_begin;
    absl::Duration stall = times.compute_begin - times.wait_begin;
    if (fill_stream_ != nullptr) {
      times.fill_begin = time(*marks.fill_begin);
      times.fill_end = time(*marks.fill_end);
      const absl::Duration fill_stall =
          std::clamp(times.fill_end - times.wait_begin, absl::ZeroDuration(), stall);
      (staged_ ? stats.pack_time : stats.copy_time) += times.fill_end - times.fill_begin;
      (staged_ ? stats.pack_stall : stats.copy_stall) += fill_stall;
      stall -= fill_stall;
    }
    deliver_stall += stall;
    if (log_ != nullptr) log_->Add(times);
    last_wait_begin_ = times.wait_begin;
  }
}

const StreamerStats& BlockStreamer::stats(int ring) {
  ReadMarks(visit());
  return stats_[ring];
}

StreamerStats BlockStreamer::stats() {
  ReadMarks(visit());
  StreamerStats sum;
  for (const StreamerStats& stats : stats_) sum += stats;
  return sum;
}

int64_t BlockStreamer::staging_bytes() const {
  int64_t bytes = 0;
  for (const auto& buffer : staging_buffers_) bytes += buffer->bytes();
  return bytes;
}

}  // namespace dlo
