// What the fuzzers and the corpus test run on one input. Each returns whether the input was
// accepted, and aborts the process if an accepted one breaks a promise of the parser's header.
#pragma once

#include <cstddef>

#include "absl/types/span.h"

namespace dlo {

// `data` as a whole safetensors file.
bool RunSafetensorsFile(absl::Span<const std::byte> data);

// `data` as the JSON of a header, framed rightly, before 16 bytes of tensor data: what a mutated
// file seldom keeps intact.
bool RunSafetensorsJson(absl::Span<const std::byte> data);

// `data` as an index file.
bool RunSafetensorsIndex(absl::Span<const std::byte> data);

}  // namespace dlo
