#include "models/component_weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "loader/fault_in.h"

namespace dlo {
namespace {

using Kind = WeightPlacement::Kind;

// Memory for packing on the way to a device that cannot read pages itself.
constexpr int64_t kPackBytes = int64_t{16} << 20;

at::Tensor View(const BlockLayout::Tensor& tensor, std::byte* base, at::Device device) {
  return at::from_blob(base + tensor.offset, tensor.spec.shape,
                       at::TensorOptions().dtype(TorchDType(tensor.spec.dtype)).device(device));
}

// Reads one shard of a block: the tensors that reach into it (and those quantised with them) go to
// `scratch`, which has room for the block, and their bytes of the shard to `to`. What lies past the
// block's end is zero.
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
  const std::vector<BlockLayout> layouts = PartLayouts(specs);
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

  std::vector<BlockLayout> layouts = PartLayouts(specs);
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
  weights.outside_ = {std::move(layouts[0]), std::move(host[0]), {}};
  for (size_t i = 1; i < layouts.size(); ++i) {
    weights.blocks_.push_back({std::move(layouts[i]), std::move(host[i]), {}});
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
  std::vector<BlockLayout> layouts = PartLayouts(specs);
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
  for (int64_t i = 0; i < weights.mapped_->num_blocks(); ++i) {
    weights.blocks_.push_back({weights.mapped_->layout(i), nullptr, weights.mapped_->pieces(i)});
  }
  return weights;
}

absl::StatusOr<ComponentWeights> ComponentWeights::Map(FinalParts parts,
                                                       absl::Span<const TensorSpec> specs,
                                                       Device& device, int threads,
                                                       const WeightPlacement& placement) {
  std::vector<BlockLayout> layouts = PartLayouts(specs);
  if (placement.kind == Kind::kResident || placement.shards != 1) {
    return absl::InvalidArgumentError("only whole weights of the host stay in a file's pages");
  }
  if (parts.offsets.size() != layouts.size()) {
    return absl::InvalidArgumentError(absl::StrCat(parts.file->path().native(), " has ",
                                                   parts.offsets.size(), " parts instead of ",
                                                   layouts.size()));
  }
  ComponentWeights weights(device, placement);
  // Not resized any more: pieces point to the names.
  for (size_t i = 0; i < layouts.size(); ++i) {
    weights.piece_names_.push_back(i == 0 ? std::string("all outside the blocks")
                                          : absl::StrCat("all of block ", i - 1));
  }
  std::vector<PackPiece> all;
  for (size_t i = 0; i < layouts.size(); ++i) {
    const int64_t bytes = layouts[i].total_bytes();
    const auto file_bytes = static_cast<int64_t>(parts.file->bytes().size());
    if (parts.offsets[i] < 0 || parts.offsets[i] > file_bytes - bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("part ", i, " reaches beyond ", parts.file->path().native()));
    }
    all.push_back({.source = parts.file->bytes().data() + parts.offsets[i],
                   .bytes = bytes,
                   .file = parts.file,
                   .tensor = weights.piece_names_[i]});
    Part part = {std::move(layouts[i]), nullptr, {all.back()}};
    if (i == 0) {
      weights.outside_ = std::move(part);
    } else {
      weights.blocks_.push_back(std::move(part));
    }
  }
  RETURN_IF_ERROR(FaultIn(all, threads).status());
  return weights;
}

absl::StatusOr<DeviceBuffer> ComponentWeights::CopyToDevice(Device& device, const Part& part) {
  const int64_t bytes = part.layout.total_bytes();
  ASSIGN_OR_RETURN(DeviceBuffer buffer, device.Allocate(bytes));
  if (part.host != nullptr) {
    RETURN_IF_ERROR(device.CopyFromHost(buffer.data(), part.host->data(), bytes));
  } else if (device.kind() == DeviceKind::kCpu) {
    RETURN_IF_ERROR(PackPieces(buffer.data(), part.pieces));
  } else {
    const int64_t step = std::min(bytes, kPackBytes);
    const auto packed = std::make_unique_for_overwrite<std::byte[]>(step);
    for (int64_t begin = 0; begin < bytes; begin += step) {
      const int64_t end = std::min(begin + step, bytes);
      RETURN_IF_ERROR(PackPieces(packed.get(), ClipPieces(part.pieces, begin, end)));
      RETURN_IF_ERROR(device.CopyFromHost(buffer.data() + begin, packed.get(), end - begin));
    }
  }
  return buffer;
}

absl::Status ComponentWeights::CopyPart(int64_t part, absl::Span<std::byte> to) const {
  if (part < 0 || part >= num_parts()) {
    return absl::InvalidArgumentError(absl::StrCat("there is no part ", part, " of ", num_parts()));
  }
  const Part& source = At(part);
  if (static_cast<int64_t>(to.size()) != source.layout.total_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "part ", part, " has ", source.layout.total_bytes(), " bytes, not ", to.size()));
  }
  if (part > 0 && placement_.shards != 1) {
    return absl::FailedPreconditionError("this process has only a shard of each block");
  }
  int64_t end = 0;
  const auto clear_until = [&](int64_t offset) { std::memset(to.data() + end, 0, offset - end); };
  if (source.host == nullptr) RETURN_IF_ERROR(PackPieces(to.data(), source.pieces));
  for (const BlockLayout::Tensor& tensor : source.layout.tensors()) {
    clear_until(tensor.offset);
    if (source.host != nullptr) {
      std::memcpy(to.data() + tensor.offset, source.host->data() + tensor.offset,
                  tensor.spec.bytes());
    }
    end = tensor.offset + tensor.spec.bytes();
  }
  clear_until(source.layout.total_bytes());
  return absl::OkStatus();
}

const std::byte* ComponentWeights::part_data(int64_t part) const {
  const Part& source = At(part);
  if (source.host != nullptr) return source.host->data();
  return source.pieces.size() == 1 ? source.pieces[0].source : nullptr;
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
    ASSIGN_OR_RETURN(DeviceBuffer buffer, CopyToDevice(*device_, blocks_[i]));
    resident.push_back({blocks_[i].layout, std::move(buffer)});
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
    const Part& part = blocks_[i];
    blocks.push_back({.layout = part.layout,
                      .bytes = part.host == nullptr ? nullptr : part.host->data(),
                      .pieces = part.pieces});
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
