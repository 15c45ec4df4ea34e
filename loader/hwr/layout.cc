#include "loader/hwr/layout.h"

#include <set>

#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "base/utf8.h"
#include "loader/hwr/layout_json.h"
#include "loader/messages.h"

namespace dlo::hwr {
namespace {

constexpr int64_t kBytesMax = int64_t{1} << 60;
constexpr size_t kNameBytesMax = 100;  // with ".bin" well within a file name

bool IsFileName(absl::string_view name) {
  if (name.empty() || name.size() > kNameBytesMax) return false;
  for (const char c : name) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '_' || c == '-';
    if (!plain) return false;
  }
  return true;
}

// The bytes of a shape, or -1.
int64_t ShapeBytes(const ArtifactTensor& tensor) {
  __int128 bytes = DTypeBytes(tensor.dtype);
  for (const int64_t size : tensor.shape) {
    if (size < 0 || size > kBytesMax) return -1;
    bytes *= size;
    if (bytes > kBytesMax) return -1;
  }
  return static_cast<int64_t>(bytes);
}

absl::Status CheckPart(const ArtifactPart& part, std::set<std::string>* names) {
  if (part.bytes < 0 || part.bytes > kBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("a part of ", part.bytes, " bytes"));
  }
  int64_t end = 0;
  for (const ArtifactTensor& tensor : part.tensors) {
    const std::string quoted = QuoteForMessage(tensor.name);
    if (tensor.name.empty() || FindInvalidUtf8(tensor.name) != absl::string_view::npos) {
      return absl::InvalidArgumentError(absl::StrCat("the tensor ", quoted, " has no name"));
    }
    if (!names->insert(tensor.name).second) {
      return absl::InvalidArgumentError(absl::StrCat("the tensor ", quoted, " comes twice"));
    }
    if (tensor.bytes < 0 || ShapeBytes(tensor) != tensor.bytes) {
      return absl::InvalidArgumentError(absl::StrCat(quoted, ": ", tensor.bytes,
                                                     " bytes do not fit ", DTypeName(tensor.dtype),
                                                     " ", ShapeText(tensor.shape)));
    }
    if (tensor.offset < end || tensor.offset > part.bytes ||
        tensor.bytes > part.bytes - tensor.offset) {
      return absl::InvalidArgumentError(absl::StrCat(quoted, ": ", tensor.bytes, " bytes at ",
                                                     tensor.offset, " in a part of ", part.bytes,
                                                     ", after ", end, " that are taken"));
    }
    end = tensor.offset + tensor.bytes;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckLayout(const ArtifactLayout& layout) {
  if (layout.empty()) return absl::InvalidArgumentError("layout: no component");
  std::set<std::string> names;
  int64_t total = 0;
  for (const ArtifactComponent& component : layout) {
    const std::string where = absl::StrCat("layout of ", QuoteForMessage(component.name));
    if (!IsFileName(component.name)) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": no name for a file"));
    }
    if (!names.insert(component.name).second) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": comes twice"));
    }
    std::set<std::string> tensors;
    for (const ArtifactPart& part : component.parts) {
      const absl::Status status = CheckPart(part, &tensors);
      if (!status.ok()) {
        return absl::InvalidArgumentError(absl::StrCat(where, ": ", status.message()));
      }
      total += PartExtent(part.bytes);
      if (total > kBytesMax) return absl::InvalidArgumentError(absl::StrCat(where, ": too large"));
    }
    if (tensors.empty()) return absl::InvalidArgumentError(absl::StrCat(where, ": no tensor"));
    if (PayloadBytes(component) == 0) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": no bytes"));
    }
  }
  return absl::OkStatus();
}

int64_t PartOffset(const ArtifactComponent& component, int part) {
  int64_t offset = 0;
  for (int i = 0; i < part; ++i) offset += PartExtent(component.parts[i].bytes);
  return offset;
}

int64_t PayloadBytes(const ArtifactComponent& component) {
  return PartOffset(component, static_cast<int>(component.parts.size()));
}

int64_t PayloadBytes(const ArtifactLayout& layout) {
  int64_t bytes = 0;
  for (const ArtifactComponent& component : layout) bytes += PayloadBytes(component);
  return bytes;
}

std::string PayloadName(const ArtifactComponent& component) {
  return absl::StrCat(component.name, ".bin");
}

nlohmann::json LayoutJson(const ArtifactLayout& layout,
                          const std::vector<std::vector<std::string>>* part_digests) {
  nlohmann::json components = nlohmann::json::array();
  for (size_t c = 0; c < layout.size(); ++c) {
    nlohmann::json parts = nlohmann::json::array();
    int64_t offset = 0;
    for (size_t p = 0; p < layout[c].parts.size(); ++p) {
      const ArtifactPart& part = layout[c].parts[p];
      nlohmann::json tensors = nlohmann::json::array();
      for (const ArtifactTensor& tensor : part.tensors) {
        tensors.push_back({{"name", tensor.name},
                           {"dtype", std::string(DTypeName(tensor.dtype))},
                           {"shape", tensor.shape},
                           {"offset", tensor.offset},
                           {"bytes", tensor.bytes}});
      }
      nlohmann::json entry = {
          {"offset", offset}, {"bytes", part.bytes}, {"tensors", std::move(tensors)}};
      if (part_digests != nullptr) entry["sha256"] = (*part_digests)[c][p];
      parts.push_back(std::move(entry));
      offset += PartExtent(part.bytes);
    }
    components.push_back({{"name", layout[c].name},
                          {"file", PayloadName(layout[c])},
                          {"bytes", offset},
                          {"parts", std::move(parts)}});
  }
  return components;
}

std::string LayoutDigest(const ArtifactLayout& layout) {
  return Sha256Of(LayoutJson(layout, nullptr).dump(-1, ' ', /*ensure_ascii=*/true));
}

}  // namespace dlo::hwr
