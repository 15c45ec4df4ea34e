// UMT5EncoderModel: prompt tokens to text embeddings.
//
//   Umt5Encoder encoder(config, std::move(weights));
//   ASSIGN_OR_RETURN(at::Tensor rows, encoder.Encode(ids));
//
// Runs at the prompt's true length. diffusers pads to 512 tokens and masks the padding, which gives
// the same rows for more work. Numerics follow transformers 5: statistics in float32, position bias
// and activation rounded in the run dtype. Belongs to one thread; throws c10::Error where libtorch
// does.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "loader/host_table.h"
#include "models/component_weights.h"
#include "models/wan/wan_config.h"

namespace dlo {

class Umt5Encoder {
 public:
  // `weights` has every tensor but the token table, of which a prompt needs a few rows only.
  Umt5Encoder(const Umt5Config& config, ComponentWeights weights, HostTable tokens);

  // The embedding of each token: [ids.size(), d_model] in the run dtype. INVALID_ARGUMENT for an id
  // outside the vocabulary; errors of HostTable::ReadRows.
  absl::StatusOr<at::Tensor> Encode(const std::vector<int64_t>& ids);

  // To be brought in before Encode and put out afterwards.
  ComponentWeights& weights() { return weights_; }

 private:
  Umt5Config config_;
  ComponentWeights weights_;
  HostTable tokens_;
};

// The bucket of each relative position: [length, length] int64, entry (i, j) for key j seen from
// query i. Bidirectional: half of the buckets for each direction, exact for near positions,
// logarithmic up to `max_distance`. Source: transformers T5Attention._relative_position_bucket.
at::Tensor RelativePositionBuckets(int64_t length, int64_t num_buckets, int64_t max_distance);

}  // namespace dlo
