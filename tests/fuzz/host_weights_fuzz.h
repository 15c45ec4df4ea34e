// What the fuzzers and the corpus test run on one input: the files of an artifact of host weights,
// and a model's JSON files. Each returns whether the input was accepted, and aborts the process if
// an accepted one breaks a promise of the parser's header.
#pragma once

#include <cstddef>

#include "absl/types/span.h"

namespace dlo {

// `data` as the document of an identity.
bool RunIdentity(absl::Span<const std::byte> data);

// `data` as manifest.json.
bool RunManifest(absl::Span<const std::byte> data);

// `data` as READY.json of one manifest, that of the corpus.
bool RunReady(absl::Span<const std::byte> data);

// `data` as each JSON file of a repository in turn, the others being in order; accepted if any is.
bool RunModelConfig(absl::Span<const std::byte> data);

}  // namespace dlo
