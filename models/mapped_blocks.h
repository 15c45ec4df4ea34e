// The blocks of a component in the pages of its checkpoint, as its plan of host weights binds them.
// Torch-free: the source of bytes for whoever moves blocks.
//
//   ASSIGN_OR_RETURN(MappedBlocks blocks, MappedBlocks::Create(checkpoint, plan, layouts));
//   ASSIGN_OR_RETURN(FaultInStats stats, blocks.FaultIn(threads));
//   RETURN_IF_ERROR(PackPieces(buffer, blocks.pieces(3)));                        // a whole block
//   RETURN_IF_ERROR(PackPieces(shard, ClipPieces(blocks.pieces(3), begin, end)));  // a rank's part
//
// Move-only; pieces stay valid as long as the object (moving it keeps them). const members may be
// called from any thread. Shares the checkpoint: its mapping goes with the last that holds it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/pack.h"
#include "loader/checkpoint.h"
#include "loader/fault_in.h"
#include "loader/host_weight_plan.h"
#include "offload/block_layout.h"

namespace dlo {

class MappedBlocks {
 public:
  // `plan` is of this checkpoint and mapped; layouts[b] is that of block b. Casts what the plan
  // casts once. Errors as LoadTensors; INTERNAL if plan and checkpoint do not belong together.
  static absl::StatusOr<MappedBlocks> Create(std::shared_ptr<const Checkpoint> checkpoint,
                                             const ComponentPlan& plan,
                                             std::vector<BlockLayout> layouts);

  int64_t num_blocks() const { return static_cast<int64_t>(layouts_.size()); }
  const BlockLayout& layout(int64_t block) const { return layouts_[block]; }
  // In the order of the layout; they cover its tensors.
  const std::vector<PackPiece>& pieces(int64_t block) const { return pieces_[block]; }

  // See loader/fault_in.h. Logs how long it took.
  absl::StatusOr<FaultInStats> FaultIn(int threads) const;

 private:
  MappedBlocks() = default;

  std::string name_;  // the component's
  std::shared_ptr<const Checkpoint> checkpoint_;
  std::vector<BlockLayout> layouts_;
  std::vector<std::vector<PackPiece>> pieces_;
  std::vector<std::byte> cast_;  // tensors that were cast once
};

}  // namespace dlo
