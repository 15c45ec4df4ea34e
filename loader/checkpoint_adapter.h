// How a model's tensor is made from a checkpoint's where the bytes are not simply the same: the
// seam between the plan of host weights, which knows no model, and what a family knows of its
// checkpoints.
//
//   auto adapter = std::make_shared<KeptFloat32Adapter>(DType::kBF16);
//   std::optional<Adaptation> how = adapter->Adapt(spec, source);
//
// Pure and const: any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/dtype.h"
#include "base/tensor_spec.h"

namespace dlo {

// What a header says of one tensor.
struct SourceTensor {
  std::string key;
  int file = 0;  // index into the source's files
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  int64_t offset = 0;  // in the file
  int64_t bytes = 0;
};

// A run of bytes on its way from the checkpoint's tensor to the needed one.
struct ByteRun {
  int64_t source = 0;       // offset in the checkpoint's tensor
  int64_t destination = 0;  // offset in the needed tensor
  int64_t bytes = 0;
  bool operator==(const ByteRun&) const = default;
};

struct Adaptation {
  std::string adapter;  // identity of what decided so, with its version
  // The needed tensor's bytes in another order, each exactly once; moved while a block is packed.
  // Empty: none is moved, the tensor is cast once into private memory.
  std::vector<ByteRun> runs;
};

class CheckpointAdapter {
 public:
  virtual ~CheckpointAdapter() = default;

  // Asked for a tensor whose bytes in the checkpoint are not the needed ones: its dtype or shape is
  // another, or the model loads it in a way of its own. nullopt: it has no answer, and the
  // checkpoint cannot stand for the weights.
  virtual std::optional<Adaptation> Adapt(const TensorSpec& spec,
                                          const SourceTensor& source) const = 0;
};

// Of models that keep a few small tensors in float32 whatever their run dtype (modulation tables,
// some norms), for checkpoints that store all in 16 bits: these are cast once. Where the run itself
// is float32 it has no answer, since then everything would be cast.
class KeptFloat32Adapter : public CheckpointAdapter {
 public:
  explicit KeptFloat32Adapter(DType run) : run_(run) {}
  std::optional<Adaptation> Adapt(const TensorSpec& spec,
                                  const SourceTensor& source) const override;

 private:
  const DType run_;
};

}  // namespace dlo
