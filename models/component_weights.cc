#include "models/component_weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/status_macros.h"
#include "offload/resident_ring.h"

namespace dlo {
namespace {

at::Tensor View(const BlockLayout::Tensor& tensor, std::byte* base, at::Device device) {
  return at::from_blob(base + tensor.offset, tensor.spec.shape,
                       at::TensorOptions().dtype(TorchDType(tensor.spec.dtype)).device(device));
}

// Layouts of a component: index 0 is what lies outside the ring, block b is index b + 1.
std::vector<BlockLayout> Layouts(absl::Span<const TensorSpec> specs) {
  int last_block = -1;
  for (const TensorSpec& spec : specs) last_block = std::max(last_block, spec.block);
  std::vector<std::vector<TensorSpec>> parts(last_block + 2);
  for (const TensorSpec& spec : specs) parts[spec.block + 1].push_back(spec);
  std::vector<BlockLayout> layouts;
  layouts.reserve(parts.size());
  for (const auto& part : parts) layouts.push_back(BlockLayout::Of(part));
  return layouts;
}

// Reads one shard of a block: the tensors that reach into it go to `scratch`, which has room for
// the block, and their bytes of the shard to `to`. What lies past the block's end is zero.
absl::Status LoadShard(const Checkpoint& checkpoint, const BlockLayout& layout,
                       const ShardOfBlocks& shard, const LoadOptions& options, std::byte* scratch,
                       std::byte* to) {
  const int64_t bytes = layout.shard_bytes(shard.count);
  const int64_t begin = shard.index * bytes;
  const int64_t end = std::min(begin + bytes, layout.total_bytes());
  std::vector<TensorSpec> specs;
  std::vector<std::byte*> destinations;
  for (const BlockLayout::Tensor& tensor : layout.tensors()) {
    if (tensor.offset >= end || tensor.offset + tensor.spec.bytes() <= begin) continue;
    specs.push_back(tensor.spec);
    destinations.push_back(scratch + tensor.offset);
  }
  LoadOptions partial = options;
  partial.partial = true;
  RETURN_IF_ERROR(LoadTensors(checkpoint, specs, destinations, partial));
  const int64_t held = std::max<int64_t>(0, end - begin);
  if (held > 0) std::memcpy(to, scratch + begin, held);
  std::memset(to + held, 0, bytes - held);
  return absl::OkStatus();
}

}  // namespace

int64_t ComponentWeights::StreamedHostBytes(absl::Span<const TensorSpec> specs,
                                            ShardOfBlocks shard) {
  const std::vector<BlockLayout> layouts = Layouts(specs);
  int64_t bytes = 0;
  for (size_t i = 1; i < layouts.size(); ++i) bytes += layouts[i].shard_bytes(shard.count);
  return bytes;
}

absl::StatusOr<ComponentWeights> ComponentWeights::Load(const Checkpoint& checkpoint,
                                                        absl::Span<const TensorSpec> specs,
                                                        Device& device, const LoadOptions& options,
                                                        BlockPlacement placement,
                                                        ShardOfBlocks shard) {
  std::vector<BlockLayout> layouts = Layouts(specs);
  const auto streamed = [placement](size_t i) {
    return i > 0 && placement == BlockPlacement::kStreamed;
  };
  // The whole list at once, before any of it is read in parts.
  RETURN_IF_ERROR(CheckTensors(checkpoint, specs, options));

  // Everything is read into host memory: where it stays, the CPU device's own, or on its way to
  // another device.
  std::vector<std::unique_ptr<HostBuffer>> host(layouts.size());
  std::vector<DeviceBuffer> buffers(layouts.size());
  std::vector<TensorSpec> ordered;
  std::vector<std::byte*> destinations;
  int64_t scratch_bytes = 0;
  for (size_t i = 0; i < layouts.size(); ++i) {
    const int64_t bytes =
        streamed(i) ? layouts[i].shard_bytes(shard.count) : layouts[i].total_bytes();
    if (!streamed(i)) {
      ASSIGN_OR_RETURN(buffers[i], device.Allocate(bytes));
    }
    if (streamed(i) || device.kind() != DeviceKind::kCpu) {
      ASSIGN_OR_RETURN(host[i], device.AllocateHost(bytes));
    }
    if (streamed(i) && shard.count > 1) {
      scratch_bytes = std::max(scratch_bytes, layouts[i].total_bytes());
      continue;
    }
    std::byte* base = host[i] != nullptr ? host[i]->data() : buffers[i].data();
    for (const BlockLayout::Tensor& tensor : layouts[i].tensors()) {
      ordered.push_back(tensor.spec);
      destinations.push_back(base + tensor.offset);
    }
  }
  LoadOptions partial = options;
  partial.partial = true;
  RETURN_IF_ERROR(LoadTensors(checkpoint, ordered, destinations, partial));
  if (scratch_bytes > 0) {
    const auto scratch = std::make_unique_for_overwrite<std::byte[]>(scratch_bytes);
    for (size_t i = 1; i < layouts.size(); ++i) {
      RETURN_IF_ERROR(
          LoadShard(checkpoint, layouts[i], shard, options, scratch.get(), host[i]->data()));
    }
  }
  for (size_t i = 0; i < layouts.size(); ++i) {
    if (host[i] == nullptr || streamed(i)) continue;
    RETURN_IF_ERROR(
        device.CopyFromHost(buffers[i].data(), host[i]->data(), layouts[i].total_bytes()));
    host[i].reset();
  }

  ComponentWeights weights(TorchDevice(device));
  for (const BlockLayout::Tensor& tensor : layouts[0].tensors()) {
    weights.tensors_[tensor.spec.name] = View(tensor, buffers[0].data(), weights.device_);
  }
  weights.outside_ = std::move(buffers[0]);
  std::vector<ResidentRing::Block> blocks;
  for (size_t i = 1; i < layouts.size(); ++i) {
    if (streamed(i)) {
      weights.host_.push_back({std::move(layouts[i]), std::move(host[i])});
    } else {
      blocks.push_back({std::move(layouts[i]), std::move(buffers[i])});
    }
  }
  if (placement == BlockPlacement::kResident) {
    weights.ring_ = std::make_unique<ResidentRing>(std::move(blocks));
  }
  return weights;
}

std::vector<HostBlock> ComponentWeights::host_blocks() const {
  std::vector<HostBlock> blocks;
  blocks.reserve(host_.size());
  for (const HostResident& block : host_) {
    blocks.push_back({.layout = block.layout, .bytes = block.weights->data()});
  }
  return blocks;
}

void ComponentWeights::StreamFrom(BlockStreamer& streamer, int ring) {
  ring_ = std::make_unique<StreamingRing>(streamer, ring, static_cast<int64_t>(host_.size()));
}

const at::Tensor& ComponentWeights::tensor(const std::string& name) const {
  const auto found = tensors_.find(name);
  TORCH_CHECK(found != tensors_.end(), "no tensor ", name, " outside the blocks");
  return found->second;
}

at::Device TorchDevice(const Device& device) {
  return device.kind() == DeviceKind::kCpu
             ? at::Device(at::kCPU)
             : at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device.index()));
}

at::ScalarType TorchDType(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return at::kFloat;
    case DType::kBF16:
      return at::kBFloat16;
    case DType::kF16:
      return at::kHalf;
    default:
      TORCH_CHECK(false, "no weights are computed with in ", std::string(DTypeName(dtype)));
  }
}

std::vector<at::Tensor> BlockViews(const BlockLease& lease, at::Device device) {
  std::vector<at::Tensor> views;
  views.reserve(lease.layout().num_tensors());
  for (const BlockLayout::Tensor& tensor : lease.layout().tensors()) {
    views.push_back(View(tensor, lease.data(), device));
  }
  return views;
}

}  // namespace dlo
