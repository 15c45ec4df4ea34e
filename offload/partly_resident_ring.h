// A ring whose leading blocks stay on the device while the others are streamed.
//
// The leading blocks are given while the component is in use and taken back afterwards. Belongs to
// one thread.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "offload/block_ring.h"
#include "offload/resident_ring.h"

namespace dlo {

class PartlyResidentRing : public BlockRing {
 public:
  PartlyResidentRing(int64_t num_resident, std::unique_ptr<BlockRing> streamed)
      : num_resident_(num_resident), streamed_(std::move(streamed)) {}

  void SetResident(std::vector<ResidentRing::Block> blocks) { resident_ = std::move(blocks); }

  int64_t num_blocks() const override { return num_resident_ + streamed_->num_blocks(); }

  absl::StatusOr<BlockLease> Acquire() override {
    const int64_t index = next_;
    next_ = (next_ + 1) % num_blocks();
    if (index >= num_resident_) return streamed_->Acquire();
    if (index >= static_cast<int64_t>(resident_.size())) {
      return absl::FailedPreconditionError("the ring's leading blocks are not on the device");
    }
    const ResidentRing::Block& block = resident_[index];
    return BlockLease(index, &block.layout, block.weights.data());
  }

  void Rewind() override {
    next_ = 0;
    streamed_->Rewind();
  }

 private:
  const int64_t num_resident_;
  const std::unique_ptr<BlockRing> streamed_;
  std::vector<ResidentRing::Block> resident_;
  int64_t next_ = 0;
};

}  // namespace dlo
