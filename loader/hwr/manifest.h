// The two metadata files of an artifact: manifest.json, which is the truth about its payload, and
// READY.json, which is written last. Parsers trust nothing; both are pure. docs/internals/
// host_weights.md describes the formats.
//
//   ASSIGN_OR_RETURN(Manifest manifest, ParseManifest(bytes));
//   RETURN_IF_ERROR(CheckReady(ready_bytes, manifest_bytes));
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "loader/hwr/identity.h"
#include "loader/hwr/layout.h"

namespace dlo::hwr {

inline constexpr int64_t kManifestBytesMax = int64_t{64} << 20;
inline constexpr int64_t kReadyBytesMax = int64_t{4} << 10;
inline constexpr absl::string_view kManifestName = "manifest.json";
inline constexpr absl::string_view kReadyName = "READY.json";

struct Manifest {
  Identity identity;
  ArtifactLayout layout;
  // SHA-256 of each part's bytes: part_digests[component][part].
  std::vector<std::vector<std::string>> part_digests;

  // SHA-256 over layout and part digests: equal for artifacts of the same content.
  std::string ContentDigest() const;
};

// Equal manifests give equal bytes.
std::string WriteManifest(const Manifest& manifest);

// INVALID_ARGUMENT for anything that WriteManifest would not write: unknown, missing or repeated
// keys, wrong types, digests, offsets, a layout that CheckLayout refuses, an identity that
// ParseIdentity refuses or whose layout digest is another.
absl::StatusOr<Manifest> ParseManifest(absl::string_view bytes);

std::string WriteReady(absl::string_view manifest_bytes, const Manifest& manifest);

// INVALID_ARGUMENT unless the marker is well-formed and is that of this manifest.
absl::Status CheckReady(absl::string_view ready_bytes, absl::string_view manifest_bytes,
                        const Manifest& manifest);

}  // namespace dlo::hwr
