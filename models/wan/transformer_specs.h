// The tensors of WanTransformer3DModel, in diffusers' names. Torch-free.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "base/quantization.h"
#include "base/tensor_spec.h"
#include "models/wan/wan_config.h"

namespace dlo {

// All tensors: those outside the blocks first, then block after block. Within a block the order is
// the one in which the forward pass binds them. Matrices and vectors take `dtype`, except the ones
// diffusers keeps in float32 (time embedder, modulation tables, norm2). 15 + 27 * num_layers
// tensors (25 a block without cross_attn_norm).
//
// With kPerTensorFp8 the linear layers of the blocks are F8_E4M3 and each "X.weight" is followed by
// its scale "X.weight_scale", float32 of one element: 8 tensors a block more. The three inputs of
// self-attention have one scale together, "attn1.to_qkv.weight_scale", after the last of them, as
// if they were one layer. Everything outside the blocks, norms, biases and tables stay as they are.
// Source: ../shared/reference/models.md, section 12.
std::vector<TensorSpec> WanTransformerSpecs(
    const WanTransformerConfig& config, DType dtype,
    OnlineQuantization quantization = OnlineQuantization::kNone);

// What rank `rank` of `tp` tensor-parallel ones holds of them: the same names in the same order,
// cut by head and by channel of the feed-forward layer. Rows (and biases) of attention's to_q,
// to_k, to_v and of ffn.net.0.proj; columns of attention's to_out.0 and of ffn.net.2, whose biases
// are whole and added once, after the sum over the ranks; norm_q and norm_k like the heads. The
// rest is whole. Quantised tensors have the scale of their slice. INVALID_ARGUMENT if `tp` does not
// divide heads and ffn_dim, or there is no such rank. Source: ../shared/reference/models.md,
// section 10.1.
absl::StatusOr<std::vector<TensorSpec>> WanTransformerTpSpecs(
    const WanTransformerConfig& config, DType dtype, int rank, int tp,
    OnlineQuantization quantization = OnlineQuantization::kNone);

}  // namespace dlo
