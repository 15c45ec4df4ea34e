// The weights of one component on a device: a ring of blocks and, by name, the tensors outside it.
//
//   ASSIGN_OR_RETURN(ComponentWeights weights, ComponentWeights::Load(checkpoint, specs, *device));
//   at::Tensor bias = weights.tensor("proj_out.bias");
//   ASSIGN_OR_RETURN(BlockLease lease, weights.ring().Acquire());
//   std::vector<at::Tensor> views = BlockViews(lease, weights.device());
//
// Move-only. Tensors are views: they are valid as long as the object (moving it keeps them).
// Belongs to one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/tensor_spec.h"
#include "loader/checkpoint.h"
#include "loader/weights.h"
#include "offload/block_ring.h"
#include "offload/block_streamer.h"
#include "runtime/device.h"

namespace dlo {

// Where a component's blocks live: on the device, or on the host, to be streamed by a
// BlockStreamer.
enum class BlockPlacement { kResident, kStreamed };

// Which part of each streamed block a process holds: one of `count` equal shards, or the whole.
struct ShardOfBlocks {
  int index = 0;
  int count = 1;
};

class ComponentWeights {
 public:
  // Reads every spec from the checkpoint; of streamed blocks only the tensors that the shard needs,
  // one block at a time, so that the peak is the result plus a block. Errors as LoadTensors,
  // RESOURCE_EXHAUSTED if device or host has no room.
  static absl::StatusOr<ComponentWeights> Load(const Checkpoint& checkpoint,
                                               absl::Span<const TensorSpec> specs, Device& device,
                                               const LoadOptions& options = {},
                                               BlockPlacement placement = BlockPlacement::kResident,
                                               ShardOfBlocks shard = {});

  // The host memory that Load takes for streamed blocks of these specs.
  static int64_t StreamedHostBytes(absl::Span<const TensorSpec> specs, ShardOfBlocks shard);

  ComponentWeights(ComponentWeights&&) = default;
  ComponentWeights& operator=(ComponentWeights&&) = default;

  // The tensor of that name outside the ring; its absence is a programmer's error and throws.
  const at::Tensor& tensor(const std::string& name) const;
  at::Device device() const { return device_; }

  // With kStreamed: what a streamer needs of the blocks, whose bytes are this process' shards. It
  // points into this object (moving it keeps that valid).
  std::vector<HostBlock> host_blocks() const;
  // With kStreamed: to be called once, before ring(). `streamer` has the host blocks as its ring of
  // that index and outlives this object.
  void StreamFrom(BlockStreamer& streamer, int ring);

  BlockRing& ring() { return *ring_; }

 private:
  explicit ComponentWeights(at::Device device) : device_(device) {}

  at::Device device_;
  DeviceBuffer outside_;
  std::map<std::string, at::Tensor> tensors_;
  struct HostResident {
    BlockLayout layout;
    std::unique_ptr<HostBuffer> weights;
  };
  std::vector<HostResident> host_;  // kStreamed
  std::unique_ptr<BlockRing> ring_;
};

// Where libtorch sees `device`.
at::Device TorchDevice(const Device& device);

at::ScalarType TorchDType(DType dtype);

// Views of the leased block's tensors, in the layout's order; valid as long as the lease.
std::vector<at::Tensor> BlockViews(const BlockLease& lease, at::Device device);

}  // namespace dlo
