// Where each tensor of one transformer block lies inside the block's byte range. Pure arithmetic.
//
//   BlockLayout layout = BlockLayout::Of(specs);
//   buffer = device->Allocate(layout.total_bytes());
//   std::byte* weight = buffer.data() + layout.tensor(2).offset;
//
// All dtypes of a block share one range, so a block moves in one piece. Every tensor starts at a
// multiple of 256 bytes; tensors whose sizes are multiples of 256 lie back to back, in the order
// given.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "base/tensor_spec.h"

namespace dlo {

class BlockLayout {
 public:
  static constexpr int64_t kAlignment = 256;

  struct Tensor {
    TensorSpec spec;
    int64_t offset = 0;  // bytes from the start of the block
  };

  BlockLayout() = default;
  static BlockLayout Of(absl::Span<const TensorSpec> specs);

  int64_t num_tensors() const { return static_cast<int64_t>(tensors_.size()); }
  const Tensor& tensor(int64_t i) const { return tensors_[i]; }
  absl::Span<const Tensor> tensors() const { return tensors_; }

  // A multiple of kAlignment.
  int64_t total_bytes() const { return total_bytes_; }

  // What each of `group_size` ranks holds of the block: equal parts, a multiple of kAlignment. The
  // last one may reach past total_bytes().
  int64_t shard_bytes(int64_t group_size) const;

  // Equal for layouts of the same names, dtypes, shapes and offsets, in any process: 64-bit FNV-1a.
  uint64_t digest() const;

 private:
  std::vector<Tensor> tensors_;
  int64_t total_bytes_ = 0;
};

// The parts of a component: index 0 is what lies outside its blocks, block b is index b + 1.
std::vector<BlockLayout> PartLayouts(absl::Span<const TensorSpec> specs);

}  // namespace dlo
