// The tensors of UMT5EncoderModel, in transformers' names. Torch-free.
#pragma once

#include <vector>

#include "base/tensor_spec.h"
#include "models/wan/wan_config.h"

namespace dlo {

// The embedding and the final norm first, then block after block, in the order in which the forward
// pass binds them: 2 + 10 * num_layers tensors, all in `dtype`.
std::vector<TensorSpec> Umt5Specs(const Umt5Config& config, DType dtype);

// The first of them: the matrix of token embeddings, whose rows are looked up on the host.
TensorSpec Umt5TokenTable(const Umt5Config& config, DType dtype);

// All others: what a device needs.
std::vector<TensorSpec> Umt5DeviceSpecs(const Umt5Config& config, DType dtype);

}  // namespace dlo
