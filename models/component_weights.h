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
#include "runtime/device.h"

namespace dlo {

class ComponentWeights {
 public:
  // Reads every spec from the checkpoint. Errors as LoadTensors, RESOURCE_EXHAUSTED if the device
  // has no room.
  static absl::StatusOr<ComponentWeights> Load(const Checkpoint& checkpoint,
                                               absl::Span<const TensorSpec> specs, Device& device,
                                               const LoadOptions& options = {});

  ComponentWeights(ComponentWeights&&) = default;
  ComponentWeights& operator=(ComponentWeights&&) = default;

  // The tensor of that name outside the ring; its absence is a programmer's error and throws.
  const at::Tensor& tensor(const std::string& name) const;
  BlockRing& ring() { return *ring_; }
  at::Device device() const { return device_; }

 private:
  explicit ComponentWeights(at::Device device) : device_(device) {}

  at::Device device_;
  DeviceBuffer outside_;
  std::map<std::string, at::Tensor> tensors_;
  std::unique_ptr<BlockRing> ring_;
};

// Where libtorch sees `device`.
at::Device TorchDevice(const Device& device);

at::ScalarType TorchDType(DType dtype);

// Views of the leased block's tensors, in the layout's order; valid as long as the lease.
std::vector<at::Tensor> BlockViews(const BlockLease& lease, at::Device device);

}  // namespace dlo
