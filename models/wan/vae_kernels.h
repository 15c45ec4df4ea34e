// The CPU kernel of AutoencoderKLWan that libtorch does not offer in one pass. Torch-free, compiled
// for several instruction sets and chosen at load time. No state, no allocation.
#pragma once

#include <cstdint>

namespace dlo {

// y = f(x / max(|x|, 1e-12) * gain) for each of `rows` rows of `channels` floats, |x| being the
// row's L2 norm and f SiLU (v * sigmoid(v)) or the identity. `x` and `y` must not overlap unless
// they are equal. SiLU is within 2e-7 of its size of the exact value.
void NormRows(const float* x, const float* gain, int64_t rows, int64_t channels, bool silu,
              float* y);

}  // namespace dlo
