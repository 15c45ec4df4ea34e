// The identity of an artifact: which bytes it holds, computed before any weight is read.
//
//   ASSIGN_OR_RETURN(Identity identity, MakeIdentity({.source = sources.digest(), ...}));
//   store->Lookup(identity, ...);   // identity.key names the artifact
//
// A JSON document in canonical form (keys sorted, no blanks, ASCII only) whose SHA-256 is the key.
// It holds content and layout and nothing else: no path, host, device, kind of transfer, replica,
// and no rank but that of tensor parallelism, which are all that may differ between processes which
// want the same bytes. Versions of our own rules are in it as texts that are changed by hand when
// the meaning changes: an edit that changes no byte keeps the stores of a fleet. Pure; any thread.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace dlo::hwr {

// Of the manifest and of what reads an artifact: both are in the identity.
inline constexpr int kManifestSchema = 1;
inline constexpr int kRestorerSchema = 1;

inline constexpr size_t kIdentityBytesMax = size_t{64} << 10;

// The canonical bytes of a JSON value. INVALID_ARGUMENT for what has no canonical form: NaN and
// infinities, binary values, text that is not UTF-8, or nesting beyond kJsonDepthMax.
absl::StatusOr<std::string> CanonicalJson(const nlohmann::json& value);

struct IdentityInputs {
  std::string source;        // SourceFingerprint::digest()
  std::string family;        // "wan"
  std::string model_config;  // SHA-256 of the configuration that the weights depend on
  std::string dtype;         // "BF16": the run's
  std::string quantization = "none";
  std::string layout;  // LayoutDigest
  int tp_size = 1;
  int tp_rank = 0;
  std::string adaptation = "base";     // any other kind needs a fingerprint
  std::string adaptation_fingerprint;  // SHA-256, or empty
  std::string producer = "dlo-final-layout";
};

struct Identity {
  std::string document;  // canonical bytes
  std::string key;       // their SHA-256: 64 lower-case hexadecimal digits
};

// INVALID_ARGUMENT: a digest that is not 64 lower-case hexadecimal digits, a word that is empty,
// too long or not of [A-Za-z0-9._+-], a rank outside its size, an adaptation without its
// fingerprint.
absl::StatusOr<Identity> MakeIdentity(const IdentityInputs& inputs);

// The identity whose canonical bytes these are. INVALID_ARGUMENT for anything else: a missing or an
// unknown key at any place, a boolean or a text for a number, another schema, bytes that are not
// canonical.
absl::StatusOr<Identity> ParseIdentity(absl::string_view document);

// Exactly 64 lower-case hexadecimal digits.
bool IsDigest(absl::string_view text);

}  // namespace dlo::hwr
