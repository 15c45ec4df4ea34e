#include "offload/block_layout.h"

namespace dlo {
namespace {

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

BlockLayout BlockLayout::Of(absl::Span<const TensorSpec> specs) {
  BlockLayout layout;
  layout.tensors_.reserve(specs.size());
  for (const TensorSpec& spec : specs) {
    layout.tensors_.push_back({spec, layout.total_bytes_});
    layout.total_bytes_ = RoundUp(layout.total_bytes_ + spec.bytes(), kAlignment);
  }
  return layout;
}

int64_t BlockLayout::shard_bytes(int64_t group_size) const {
  return RoundUp((total_bytes_ + group_size - 1) / group_size, kAlignment);
}

}  // namespace dlo
