#include "tests/fuzz/host_weights_fuzz.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/sha256.h"
#include "loader/hwr/manifest.h"

namespace dlo {
namespace {

void Promise(bool kept, const char* what) {
  if (kept) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

void CheckRefusal(const absl::Status& status) {
  Promise(status.code() == absl::StatusCode::kInvalidArgument, "a refusal is INVALID_ARGUMENT");
  Promise(!status.message().empty() && status.message().size() < 4096, "it says why, shortly");
}

// A copy of exactly these bytes, so that a read past the end is seen by the address sanitizer.
std::string Copy(absl::Span<const std::byte> data) {
  return {reinterpret_cast<const char*>(data.data()), data.size()};
}

hwr::Manifest SampleManifest() {
  hwr::Manifest manifest;
  manifest.layout = {
      {.name = "vae", .parts = {{.tensors = {{"w", DType::kF32, {4}, 0, 16}}, .bytes = 256}}}};
  manifest.identity = *hwr::MakeIdentity({.source = std::string(64, '1'),
                                          .family = "wan",
                                          .model_config = std::string(64, '2'),
                                          .dtype = "BF16",
                                          .layout = hwr::LayoutDigest(manifest.layout)});
  manifest.part_digests = {{std::string(64, '3')}};
  return manifest;
}

}  // namespace

bool RunIdentity(absl::Span<const std::byte> data) {
  const std::string text = Copy(data);
  const absl::StatusOr<hwr::Identity> identity = hwr::ParseIdentity(text);
  if (!identity.ok()) {
    CheckRefusal(identity.status());
    return false;
  }
  Promise(identity->document == text, "an identity is its bytes");
  Promise(identity->key == Sha256Of(text), "the key is their digest");
  return true;
}

bool RunManifest(absl::Span<const std::byte> data) {
  const std::string text = Copy(data);
  const absl::StatusOr<hwr::Manifest> manifest = hwr::ParseManifest(text);
  if (!manifest.ok()) {
    CheckRefusal(manifest.status());
    return false;
  }
  Promise(hwr::WriteManifest(*manifest) == text, "what was read can be written");
  Promise(hwr::CheckLayout(manifest->layout).ok(), "the layout can be laid out");
  Promise(manifest->part_digests.size() == manifest->layout.size(), "each component has digests");
  for (size_t c = 0; c < manifest->layout.size(); ++c) {
    const hwr::ArtifactComponent& component = manifest->layout[c];
    Promise(manifest->part_digests[c].size() == component.parts.size(), "each part has one");
    Promise(hwr::PayloadBytes(component) > 0, "a payload has bytes");
    for (const hwr::ArtifactPart& part : component.parts) {
      for (const hwr::ArtifactTensor& tensor : part.tensors) {
        Promise(
            tensor.offset >= 0 && tensor.bytes >= 0 && tensor.offset + tensor.bytes <= part.bytes,
            "a tensor lies inside its part");
      }
    }
  }
  Promise(hwr::CheckReady(hwr::WriteReady(text, *manifest), text, *manifest).ok(),
          "its marker is its own");
  return true;
}

bool RunReady(absl::Span<const std::byte> data) {
  const std::string text = Copy(data);
  const hwr::Manifest manifest = SampleManifest();
  const std::string bytes = hwr::WriteManifest(manifest);
  const absl::Status status = hwr::CheckReady(text, bytes, manifest);
  if (!status.ok()) {
    CheckRefusal(status);
    return false;
  }
  Promise(text == hwr::WriteReady(bytes, manifest), "a manifest has one marker");
  return true;
}

}  // namespace dlo
