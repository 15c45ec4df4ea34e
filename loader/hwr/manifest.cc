#include "loader/hwr/manifest.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "loader/hwr/layout_json.h"
#include "loader/hwr/strict_json.h"

namespace dlo::hwr {
namespace {

using nlohmann::json;

constexpr int kReadySchema = 1;
constexpr size_t kComponentsMax = 64;
constexpr size_t kPartsMax = 1 << 16;
constexpr size_t kTensorsMax = 1 << 20;
constexpr size_t kDimensionsMax = 16;
constexpr int64_t kBytesMax = int64_t{1} << 60;

std::string Dump(const json& value) { return value.dump(-1, ' ', /*ensure_ascii=*/true); }

absl::StatusOr<ArtifactTensor> ParseTensor(const json& value) {
  StrictObject object(value, "manifest tensor");
  ArtifactTensor tensor;
  tensor.name = object.String("name");
  const std::string dtype = object.Word("dtype");
  for (const json& size : object.List("shape", kDimensionsMax)) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > uint64_t{kBytesMax}) {
      object.Fail("shape", "holds what is no size");
      break;
    }
    tensor.shape.push_back(size.get<int64_t>());
  }
  tensor.offset = object.Int("offset", 0, kBytesMax);
  tensor.bytes = object.Int("bytes", 0, kBytesMax);
  RETURN_IF_ERROR(object.Finish());
  ASSIGN_OR_RETURN(tensor.dtype, ParseDType(dtype));
  return tensor;
}

absl::Status ParsePart(const json& value, ArtifactPart* part, std::string* digest) {
  StrictObject object(value, "manifest part");
  object.Int("offset", 0, kBytesMax);  // follows from the sizes; the bytes are compared at the end
  part->bytes = object.Int("bytes", 0, kBytesMax);
  *digest = object.Digest("sha256");
  const json& tensors = object.List("tensors", kTensorsMax);
  RETURN_IF_ERROR(object.Finish());
  for (const json& entry : tensors) {
    ASSIGN_OR_RETURN(ArtifactTensor tensor, ParseTensor(entry));
    part->tensors.push_back(std::move(tensor));
  }
  return absl::OkStatus();
}

absl::Status ParseComponent(const json& value, Manifest* manifest) {
  StrictObject object(value, "manifest component");
  ArtifactComponent component;
  component.name = object.Word("name");
  object.Word("file");
  object.Int("bytes", 0, kBytesMax);
  const json& parts = object.List("parts", kPartsMax);
  RETURN_IF_ERROR(object.Finish());
  std::vector<std::string> digests;
  for (const json& entry : parts) {
    ArtifactPart part;
    std::string digest;
    RETURN_IF_ERROR(ParsePart(entry, &part, &digest));
    component.parts.push_back(std::move(part));
    digests.push_back(std::move(digest));
  }
  manifest->layout.push_back(std::move(component));
  manifest->part_digests.push_back(std::move(digests));
  return absl::OkStatus();
}

}  // namespace

std::string Manifest::ContentDigest() const {
  return Sha256Of(Dump(LayoutJson(layout, &part_digests)));
}

std::string WriteManifest(const Manifest& manifest) {
  return Dump({{"schema", kManifestSchema},
               {"key", manifest.identity.key},
               {"identity", json::parse(manifest.identity.document)},
               {"content", manifest.ContentDigest()},
               {"components", LayoutJson(manifest.layout, &manifest.part_digests)}});
}

absl::StatusOr<Manifest> ParseManifest(absl::string_view bytes) {
  if (static_cast<int64_t>(bytes.size()) > kManifestBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("manifest: ", bytes.size(), " bytes are too many"));
  }
  ASSIGN_OR_RETURN(const json value, ParseJson(bytes, "manifest"));
  StrictObject top(value, "manifest");
  top.Int("schema", kManifestSchema, kManifestSchema);
  const std::string key = top.Digest("key");
  top.Digest("content");
  const json& identity = top.Object("identity");
  const json& components = top.List("components", kComponentsMax);
  RETURN_IF_ERROR(top.Finish());

  Manifest manifest;
  ASSIGN_OR_RETURN(manifest.identity, ParseIdentity(Dump(identity)));
  for (const json& entry : components) RETURN_IF_ERROR(ParseComponent(entry, &manifest));
  RETURN_IF_ERROR(CheckLayout(manifest.layout));
  if (manifest.identity.key != key) {
    return absl::InvalidArgumentError("manifest: the key is not the identity's");
  }
  if (identity["layout"]["digest"] != LayoutDigest(manifest.layout)) {
    return absl::InvalidArgumentError("manifest: the layout is not the identity's");
  }
  if (WriteManifest(manifest) != bytes) {
    return absl::InvalidArgumentError(
        "manifest: the bytes are not in canonical form, or an offset, size, file name or the "
        "content digest does not follow from the rest");
  }
  return manifest;
}

std::string WriteReady(absl::string_view manifest_bytes, const Manifest& manifest) {
  return Dump({{"schema", kReadySchema},
               {"key", manifest.identity.key},
               {"manifest_bytes", manifest_bytes.size()},
               {"manifest_sha256", Sha256Of(manifest_bytes)},
               {"content", manifest.ContentDigest()},
               {"integrity", "sha256-of-parts"}});
}

absl::Status CheckReady(absl::string_view ready_bytes, absl::string_view manifest_bytes,
                        const Manifest& manifest) {
  if (ready_bytes != WriteReady(manifest_bytes, manifest)) {
    return absl::InvalidArgumentError("READY.json is not the marker of this manifest");
  }
  return absl::OkStatus();
}

}  // namespace dlo::hwr
