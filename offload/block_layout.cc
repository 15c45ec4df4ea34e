#include "offload/block_layout.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/dtype.h"

namespace dlo {
namespace {

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// http://www.isthe.com/chongo/tech/comp/fnv/
class Fnv1a {
 public:
  void Add(absl::string_view bytes) {
    for (const char byte : bytes) hash_ = (hash_ ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
  }
  uint64_t hash() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

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

uint64_t BlockLayout::digest() const {
  Fnv1a hash;
  for (const Tensor& tensor : tensors_) {
    hash.Add(absl::StrCat(tensor.spec.name, " ", DTypeName(tensor.spec.dtype), " ",
                          absl::StrJoin(tensor.spec.shape, "x"), " @", tensor.offset, "\n"));
  }
  return hash.hash();
}

std::vector<BlockLayout> PartLayouts(absl::Span<const TensorSpec> specs) {
  int last_block = -1;
  for (const TensorSpec& spec : specs) last_block = std::max(last_block, spec.block);
  std::vector<std::vector<TensorSpec>> parts(last_block + 2);
  for (const TensorSpec& spec : specs) parts[spec.block + 1].push_back(spec);
  std::vector<BlockLayout> layouts;
  layouts.reserve(parts.size());
  for (const auto& part : parts) layouts.push_back(BlockLayout::Of(part));
  return layouts;
}

}  // namespace dlo
