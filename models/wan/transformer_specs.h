// The tensors of WanTransformer3DModel, in diffusers' names. Torch-free.
#pragma once

#include <vector>

#include "base/tensor_spec.h"
#include "models/wan/wan_config.h"

namespace dlo {

// All tensors: those outside the blocks first, then block after block. Within a block the order is
// the one in which the forward pass binds them. Matrices and vectors take `dtype`, except the ones
// diffusers keeps in float32 (time embedder, modulation tables, norm2). 15 + 27 * num_layers
// tensors (25 a block without cross_attn_norm).
std::vector<TensorSpec> WanTransformerSpecs(const WanTransformerConfig& config, DType dtype);

}  // namespace dlo
