#include "models/component_weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/string_view.h"
#include "base/status_macros.h"

namespace dlo {
namespace {

using Kind = WeightPlacement::Kind;

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

// Reads one shard of a block: the tensors that reach into it (and those quantised with them) go to
// `scratch`, which has room for the block, and their bytes of the shard to `to`. What lies past the block's end is zero.
absl::Status LoadShard(const Checkpoint& checkpoint, const BlockLayout& layout,
                       const WeightPlacement& placement, const LoadOptions& partial,
                       std::byte* scratch, std::byte* to) {
  const int64_t bytes = layout.shard_bytes(placement.shards);
  const int64_t begin = placement.shard * bytes;
  const int64_t end = std::min(begin + bytes, layout.total_bytes());
  const auto reaches_in = [&](const BlockLayout::Tensor& tensor) {
    return tensor.offset < end && tensor.offset + tensor.spec.bytes() > begin;
  };
  // A scale is made of all the tensors that have it.
  std::set<absl::string_view> scales;
  for (const BlockLayout::Tensor& tensor : layout.tensors()) {
    if (!reaches_in(tensor)) continue;
    scales.insert(tensor.spec.scale.empty() ? tensor.spec.name : tensor.spec.scale);
  }
  std::vector<TensorSpec> specs;
  std::vector<std::byte*> destinations;
  for (const BlockLayout::Tensor& tensor : layout.tensors()) {
    if (!scales.contains(tensor.spec.name) && !scales.contains(tensor.spec.scale)) continue;
    specs.push_back(tensor.spec);
    destinations.push_back(scratch + tensor.offset);
  }
  RETURN_IF_ERROR(LoadTensors(checkpoint, specs, destinations, partial));
  const int64_t held = std::max<int64_t>(0, end - begin);
  if (held > 0) std::memcpy(to, scratch + begin, held);
  std::memset(to + held, 0, bytes - held);
  return absl::OkStatus();
}

}  // namespace

ComponentWeights::ComponentWeights(Device& device, const WeightPlacement& placement)
    : device_(&device), torch_device_(TorchDevice(device)), placement_(placement) {}

int64_t ComponentWeights::HostBlockBytes(absl::Span<const TensorSpec> specs,
                                         const WeightPlacement& placement) {
  if (placement.kind == Kind::kResident) return 0;
  const std::vector<BlockLayout> layouts = Layouts(specs);
  int64_t bytes = 0;
  for (size_t i = 1; i < layouts.size(); ++i) bytes += layouts[i].shard_bytes(placement.shards);
  return bytes;
}

absl::StatusOr<ComponentWeights> ComponentWeights::Load(const Checkpoint& checkpoint,
                                                        absl::Span<const TensorSpec> specs,
                                                        Device& device, const LoadOptions& options,
                                                        const WeightPlacement& placement) {
  // The whole list at once, before any of it is read in parts.
  RETURN_IF_ERROR(CheckTensors(checkpoint, specs, options));
  LoadOptions partial = options;
  partial.partial = true;

  std::vector<BlockLayout> layouts = Layouts(specs);
  const auto sharded = [&](size_t i) { return i > 0 && placement.shards > 1; };
  // Everything is read into host memory: where it stays, the CPU device's own, or on its way to
  // another device.
  const bool resident = placement.kind == Kind::kResident;
  const bool straight = resident && device.kind() == DeviceKind::kCpu;
  std::vector<std::unique_ptr<HostBuffer>> host(layouts.size());
  std::vector<DeviceBuffer> buffers(layouts.size());
  std::vector<TensorSpec> whole;
  std::vector<std::byte*> destinations;
  int64_t scratch_bytes = 0;
  for (size_t i = 0; i < layouts.size(); ++i) {
    if (resident) {
      ASSIGN_OR_RETURN(buffers[i], device.Allocate(layouts[i].total_bytes()));
    }
    if (!straight) {
      ASSIGN_OR_RETURN(host[i],
                       device.AllocateHost(sharded(i) ? layouts[i].shard_bytes(placement.shards)
                                                      : layouts[i].total_bytes()));
    }
    if (sharded(i)) {
      scratch_bytes = std::max(scratch_bytes, layouts[i].total_bytes());
      continue;
    }
    std::byte* base = straight ? buffers[i].data() : host[i]->data();
    for (const BlockLayout::Tensor& tensor : layouts[i].tensors()) {
      whole.push_back(tensor.spec);
      destinations.push_back(base + tensor.offset);
    }
  }
  RETURN_IF_ERROR(LoadTensors(checkpoint, whole, destinations, partial));
  if (scratch_bytes > 0) {
    const auto scratch = std::make_unique_for_overwrite<std::byte[]>(scratch_bytes);
    for (size_t i = 1; i < layouts.size(); ++i) {
      RETURN_IF_ERROR(
          LoadShard(checkpoint, layouts[i], placement, partial, scratch.get(), host[i]->data()));
    }
  }

  ComponentWeights weights(device, placement);
  weights.outside_ = {std::move(layouts[0]), std::move(host[0])};
  for (size_t i = 1; i < layouts.size(); ++i) {
    weights.blocks_.push_back({std::move(layouts[i]), std::move(host[i])});
  }
  if (!resident) return weights;

  std::vector<ResidentRing::Block> blocks;
  for (size_t i = 0; i < buffers.size(); ++i) {
    Part& part = i == 0 ? weights.outside_ : weights.blocks_[i - 1];
    if (!straight) {
      RETURN_IF_ERROR(
          device.CopyFromHost(buffers[i].data(), part.host->data(), buffers[i].bytes()));
      part.host.reset();
    }
    if (i > 0) blocks.push_back({std::move(part.layout), std::move(buffers[i])});
  }
  weights.SetOutside(std::move(buffers[0]));
  weights.blocks_.clear();
  weights.ring_ = std::make_unique<ResidentRing>(std::move(blocks));
  return weights;
}

absl::StatusOr<ComponentWeights> ComponentWeights::LoadMapped(
    std::shared_ptr<const Checkpoint> checkpoint, absl::Span<const TensorSpec> specs,
    Device& device, const LoadOptions& options, const WeightPlacement& placement,
    const ComponentPlan& plan) {
  std::vector<BlockLayout> layouts = Layouts(specs);
  std::vector<TensorSpec> outside;
  for (const BlockLayout::Tensor& tensor : layouts[0].tensors()) outside.push_back(tensor.spec);
  layouts.erase(layouts.begin());
  // The plan accounts for every tensor of the checkpoint.
  LoadOptions partial = options;
  partial.partial = true;
  ASSIGN_OR_RETURN(ComponentWeights weights,
                   Load(*checkpoint, outside, device, partial, placement));
  ASSIGN_OR_RETURN(weights.mapped_,
                   MappedBlocks::Create(std::move(checkpoint), plan, std::move(layouts)));
  RETURN_IF_ERROR(weights.mapped_->FaultIn(options.threads).status());
  return weights;
}

int64_t ComponentWeights::num_blocks() const {
  return mapped_ ? mapped_->num_blocks() : static_cast<int64_t>(blocks_.size());
}

absl::StatusOr<ResidentRing::Block> ComponentWeights::BlockToDevice(int64_t block) const {
  if (!mapped_) {
    ASSIGN_OR_RETURN(DeviceBuffer buffer, CopyToDevice(*device_, blocks_[block]));
    return ResidentRing::Block{blocks_[block].layout, std::move(buffer)};
  }
  const BlockLayout& layout = mapped_->layout(block);
  ASSIGN_OR_RETURN(DeviceBuffer buffer, device_->Allocate(layout.total_bytes()));
  if (device_->kind() == DeviceKind::kCpu) {
    RETURN_IF_ERROR(PackPieces(buffer.data(), mapped_->pieces(block)));
  } else {
    const auto packed = std::make_unique_for_overwrite<std::byte[]>(layout.total_bytes());
    RETURN_IF_ERROR(PackPieces(packed.get(), mapped_->pieces(block)));
    RETURN_IF_ERROR(device_->CopyFromHost(buffer.data(), packed.get(), layout.total_bytes()));
  }
  return ResidentRing::Block{layout, std::move(buffer)};
}

absl::StatusOr<DeviceBuffer> ComponentWeights::CopyToDevice(Device& device, const Part& part) {
  const int64_t bytes = part.layout.total_bytes();
  ASSIGN_OR_RETURN(DeviceBuffer buffer, device.Allocate(bytes));
  RETURN_IF_ERROR(device.CopyFromHost(buffer.data(), part.host->data(), bytes));
  return buffer;
}

void ComponentWeights::SetOutside(DeviceBuffer buffer) {
  outside_on_device_ = std::move(buffer);
  for (const BlockLayout::Tensor& tensor : outside_.layout.tensors()) {
    tensors_[tensor.spec.name] = View(tensor, outside_on_device_.data(), torch_device_);
  }
}

absl::Status ComponentWeights::BringIn() {
  if (placement_.kind == Kind::kResident || in_) return absl::OkStatus();
  ASSIGN_OR_RETURN(DeviceBuffer outside, CopyToDevice(*device_, outside_));
  // Without a streamer's slots, all blocks.
  const int64_t num_resident =
      placement_.kind == Kind::kStaged ? num_blocks() : placement_.resident_blocks;
  std::vector<ResidentRing::Block> resident;
  for (int64_t i = 0; i < num_resident; ++i) {
    ASSIGN_OR_RETURN(ResidentRing::Block block, BlockToDevice(i));
    resident.push_back(std::move(block));
  }
  in_ = true;
  SetOutside(std::move(outside));
  if (placement_.kind == Kind::kStaged) {
    ring_ = std::make_unique<ResidentRing>(std::move(resident));
  } else if (partly_ != nullptr) {
    partly_->SetResident(std::move(resident));
  }
  return absl::OkStatus();
}

void ComponentWeights::PutOut() {
  if (placement_.kind == Kind::kResident) return;
  in_ = false;
  tensors_.clear();
  outside_on_device_ = DeviceBuffer();
  if (placement_.kind == Kind::kStaged) {
    ring_.reset();
  } else if (partly_ != nullptr) {
    partly_->SetResident({});
  }
}

std::vector<HostBlock> ComponentWeights::host_blocks() const {
  std::vector<HostBlock> blocks;
  for (int64_t i = placement_.resident_blocks; i < num_blocks(); ++i) {
    if (mapped_) {
      blocks.push_back({.layout = mapped_->layout(i), .pieces = mapped_->pieces(i)});
    } else {
      blocks.push_back({.layout = blocks_[i].layout, .bytes = blocks_[i].host->data()});
    }
  }
  return blocks;
}

void ComponentWeights::StreamFrom(BlockStreamer& streamer, int ring) {
  const int64_t num_streamed = num_blocks() - placement_.resident_blocks;
  ring_ = std::make_unique<StreamingRing>(streamer, ring, num_streamed);
  if (placement_.resident_blocks == 0) return;
  auto partly = std::make_unique<PartlyResidentRing>(placement_.resident_blocks, std::move(ring_));
  partly_ = partly.get();
  ring_ = std::move(partly);
}

const at::Tensor& ComponentWeights::tensor(const std::string& name) const {
  const auto found = tensors_.find(name);
  TORCH_CHECK(found != tensors_.end(), "no tensor ", name,
              " outside the blocks, or not brought in");
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
    case DType::kF8E4M3:
      return at::kFloat8_e4m3fn;
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
