// The weights of one component on a device: a ring of blocks and, by name, the tensors outside it.
//
//   ASSIGN_OR_RETURN(ComponentWeights weights,
//                    ComponentWeights::Load(checkpoint, specs, *device));
//   RETURN_IF_ERROR(weights.BringIn());
//   at::Tensor bias = weights.tensor("proj_out.bias");
//   ASSIGN_OR_RETURN(BlockLease lease, weights.ring().Acquire());
//   std::vector<at::Tensor> views = BlockViews(lease, weights.device());
//
// Resident weights are on the device for good. Those of a component that streams, or that is staged
// without streaming, are in host memory; between BringIn and PutOut the tensors outside the ring,
// and the ring's resident leading blocks, are on the device too.
//
// Move-only. Tensors are views: they are valid as long as the object (moving it keeps them) and
// until PutOut. Belongs to one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/mapped_file.h"
#include "base/pack.h"
#include "base/tensor_spec.h"
#include "loader/checkpoint.h"
#include "loader/host_weight_plan.h"
#include "loader/weights.h"
#include "models/mapped_blocks.h"
#include "offload/block_ring.h"
#include "offload/block_streamer.h"
#include "offload/partly_resident_ring.h"
#include "offload/resident_ring.h"
#include "runtime/device.h"

namespace dlo {

// Where a component's weights live.
struct WeightPlacement {
  enum class Kind {
    kResident,  // on the device, all of them
    kStaged,    // on the host, and on the device while the component is in use
    kStreamed   // the same, but blocks come to the device one by one, by a BlockStreamer
  };
  Kind kind = Kind::kResident;
  // kStreamed: which of `shards` equal parts of each block this process holds.
  int shard = 0;
  int shards = 1;
  // kStreamed, with whole blocks: so many leading ones are not streamed but staged.
  int64_t resident_blocks = 0;
};

// A component's weights in a file, each of its PartLayouts as it will be on the device.
struct FinalParts {
  const MappedFile* file = nullptr;  // outlives the weights
  std::vector<int64_t> offsets;      // in the file, of each part
};

class ComponentWeights {
 public:
  // Reads every spec from the checkpoint; of sharded blocks only the tensors that the shard needs,
  // one block at a time, so that the peak is the result plus a block. Errors as LoadTensors,
  // RESOURCE_EXHAUSTED if device or host has no room.
  static absl::StatusOr<ComponentWeights> Load(const Checkpoint& checkpoint,
                                               absl::Span<const TensorSpec> specs, Device& device,
                                               const LoadOptions& options = {},
                                               const WeightPlacement& placement = {});

  // The same with kStreamed and whole blocks, which stay in the checkpoint's pages as `plan` (of
  // this checkpoint, mapped) binds them: only what is outside the blocks is read. Faults the pages
  // in and logs how long that took. What is read from them later may fail as MappedFile::Read does.
  static absl::StatusOr<ComponentWeights> LoadMapped(std::shared_ptr<const Checkpoint> checkpoint,
                                                     absl::Span<const TensorSpec> specs,
                                                     Device& device, const LoadOptions& options,
                                                     const WeightPlacement& placement,
                                                     const ComponentPlan& plan);

  // The same with kStaged, or kStreamed and whole blocks, of weights that lie in a file as they
  // run: all of them stay in its pages and no memory is taken for them. Faults the pages in by
  // `threads` (as in LoadOptions). What is read from them later may fail as MappedFile::Read does.
  // INVALID_ARGUMENT for parts that the specs do not have.
  static absl::StatusOr<ComponentWeights> Map(FinalParts parts, absl::Span<const TensorSpec> specs,
                                              Device& device, int threads,
                                              const WeightPlacement& placement);

  // The host memory that Load takes for blocks of these specs.
  static int64_t HostBlockBytes(absl::Span<const TensorSpec> specs,
                                const WeightPlacement& placement);

  ComponentWeights(ComponentWeights&&) = default;
  ComponentWeights& operator=(ComponentWeights&&) = default;

  // Before the component is used and after; nothing to do with resident weights. BringIn is
  // RESOURCE_EXHAUSTED, and leaves nothing behind, if the device has no room.
  absl::Status BringIn();
  void PutOut();

  // The tensor of that name outside the ring; its absence is a programmer's error and throws.
  const at::Tensor& tensor(const std::string& name) const;
  at::Device device() const { return torch_device_; }

  // With kStreamed: what a streamer needs of the blocks behind the resident ones; their bytes are
  // this process' shards. It points into this object (moving it keeps that valid).
  std::vector<HostBlock> host_blocks() const;
  // With kStreamed: to be called once, before ring(). `streamer` has the host blocks as its ring of
  // that index and outlives this object.
  void StreamFrom(BlockStreamer& streamer, int ring);

  // Resident, or once BringIn or StreamFrom has made it.
  BlockRing& ring() { return *ring_; }

  // The host's copy of the weights, by PartLayouts' index; none with kResident.
  int64_t num_parts() const { return 1 + num_blocks(); }
  const BlockLayout& part_layout(int64_t part) const { return At(part).layout; }
  // Fills `to`, of part_layout(part).total_bytes(): the tensors in their places, zero between them.
  // INVALID_ARGUMENT for another part or size; DATA_LOSS if they lie in a file that has changed;
  // FAILED_PRECONDITION for sharded blocks.
  absl::Status CopyPart(int64_t part, absl::Span<std::byte> to) const;
  // Where the part's bytes lie if they are one run in memory, mapped or not, else null.
  const std::byte* part_data(int64_t part) const;

 private:
  ComponentWeights(Device& device, const WeightPlacement& placement);

  // The host's copy is in either `host` or `pieces`.
  struct Part {
    BlockLayout layout;
    std::unique_ptr<HostBuffer> host;
    std::vector<PackPiece> pieces;
  };
  static absl::StatusOr<DeviceBuffer> CopyToDevice(Device& device, const Part& part);
  const Part& At(int64_t part) const { return part == 0 ? outside_ : blocks_[part - 1]; }
  int64_t num_blocks() const { return static_cast<int64_t>(blocks_.size()); }
  void SetOutside(DeviceBuffer buffer);

  Device* device_;
  at::Device torch_device_;
  WeightPlacement placement_;
  Part outside_;  // outside the ring; without a copy on the host if resident
  DeviceBuffer outside_on_device_;
  std::map<std::string, at::Tensor> tensors_;  // views of it
  std::vector<Part> blocks_;                   // none if resident
  // What pieces point into.
  std::optional<MappedBlocks> mapped_;
  std::vector<std::string> piece_names_;
  std::unique_ptr<BlockRing> ring_;
  PartlyResidentRing* partly_ = nullptr;  // ring_, with resident blocks
  bool in_ = false;
};

// Where libtorch sees `device`.
at::Device TorchDevice(const Device& device);

at::ScalarType TorchDType(DType dtype);

// Views of the leased block's tensors, in the layout's order; valid as long as the lease.
std::vector<at::Tensor> BlockViews(const BlockLease& lease, at::Device device);

}  // namespace dlo
