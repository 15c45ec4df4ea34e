// What a model says about one of its tensors before any weight is read: the vocabulary shared by
// models (which state it), the loader (which fills it from a checkpoint) and offload (which lays
// blocks out from it).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace dlo {

// Which part of a checkpoint's tensor a rank holds: the indices `begin` to `begin` + shape[dim] of
// the dimension `dim`, which counts `full` in the checkpoint.
struct TensorSlice {
  int dim = 0;
  int64_t begin = 0;
  int64_t full = 0;
  bool operator==(const TensorSlice&) const = default;
};

struct TensorSpec {
  std::string name;                  // as in the checkpoint, e.g. "blocks.3.attn1.to_q.weight"
  std::vector<int64_t> shape;        // row-major, contiguous
  DType dtype = DType::kF32;         // the run dtype (the checkpoint's may differ; loading casts)
  int block = -1;                    // index in the component's block ring, or -1: outside the ring
  std::vector<std::string> aliases;  // other names under which checkpoints hold it
  std::optional<TensorSlice> slice;  // none: the whole tensor; else `shape` is the slice's
  // Of a tensor that is quantised to F8_E4M3 while it is loaded: the name of the spec, F32 of one
  // element, that becomes its scale. Tensors that name one spec share the scale.
  std::string scale;

  int64_t num_elements() const {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    return n;
  }
  int64_t bytes() const { return num_elements() * DTypeBytes(dtype); }
};

}  // namespace dlo
