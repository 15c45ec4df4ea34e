// A ring whose blocks all stay on the device.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "offload/block_ring.h"
#include "runtime/device.h"

namespace dlo {

class ResidentRing : public BlockRing {
 public:
  struct Block {
    BlockLayout layout;
    DeviceBuffer weights;
  };

  explicit ResidentRing(std::vector<Block> blocks) : blocks_(std::move(blocks)) {}

  int64_t num_blocks() const override { return static_cast<int64_t>(blocks_.size()); }

  absl::StatusOr<BlockLease> Acquire() override {
    if (blocks_.empty()) return absl::FailedPreconditionError("the ring has no blocks");
    const int64_t index = next_;
    next_ = (next_ + 1) % num_blocks();
    const Block& block = blocks_[index];
    return BlockLease(index, &block.layout, block.weights.data());
  }

  void Rewind() override { next_ = 0; }

 private:
  std::vector<Block> blocks_;
  int64_t next_ = 0;
};

}  // namespace dlo
