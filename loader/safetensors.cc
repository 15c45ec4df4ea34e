#include "loader/safetensors.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <optional>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "loader/messages.h"
#include "loader/safetensors_format.h"

namespace dlo {
namespace {

constexpr size_t kDataAlignment = 64;

absl::Status WriteAll(int fd, absl::string_view data, const std::string& path) {
  while (!data.empty()) {
    ssize_t written = write(fd, data.data(), data.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
    }
    data.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

// The JSON form of a string that must be UTF-8.
absl::StatusOr<std::string> JsonString(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    return absl::InvalidArgumentError(absl::StrCat(QuoteForMessage(text), " is not UTF-8"));
  }
}

}  // namespace

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::filesystem::path& path) {
  SafetensorsFile file;
  ASSIGN_OR_RETURN(file.mapping_, MappedFile::Open(path));
  ASSIGN_OR_RETURN(file.header_,
                   ParseSafetensorsHeader(file.mapping_.bytes(), file.size_bytes(), path.native()));
  return file;
}

absl::StatusOr<std::string> SafetensorsPreamble(
    absl::Span<const SafetensorsTensor> tensors,
    const std::map<std::string, std::string>& metadata) {
  std::vector<std::string> items;
  if (!metadata.empty()) {
    std::vector<std::string> pairs;
    for (const auto& [key, value] : metadata) {
      ASSIGN_OR_RETURN(std::string json_key, JsonString(key));
      ASSIGN_OR_RETURN(std::string json_value, JsonString(value));
      pairs.push_back(absl::StrCat(json_key, ":", json_value));
    }
    items.push_back(
        absl::StrCat("\"", kSafetensorsMetadataKey, "\":{", absl::StrJoin(pairs, ","), "}"));
  }
  std::set<std::string> names = {kSafetensorsMetadataKey};
  int64_t offset = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    if (tensor.name.empty() || !names.insert(tensor.name).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the tensor name ", QuoteForMessage(tensor.name), " is empty, reserved or used twice"));
    }
    ASSIGN_OR_RETURN(std::string json_name, JsonString(tensor.name));
    std::optional<int64_t> bytes = TensorBytes(tensor.shape, tensor.dtype);
    int64_t end = 0;
    if (tensor.shape.size() > kSafetensorsRankMax || !bytes ||
        __builtin_add_overflow(offset, *bytes, &end)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", QuoteForMessage(tensor.name), " cannot have ", tensor.shape.size(),
          " dimensions ",
          ShapeText(absl::MakeConstSpan(tensor.shape).subspan(0, kSafetensorsRankMax))));
    }
    items.push_back(absl::StrCat(json_name, ":{\"dtype\":\"", DTypeName(tensor.dtype),
                                 "\",\"shape\":[", absl::StrJoin(tensor.shape, ","),
                                 "],\"data_offsets\":[", offset, ",", end, "]}"));
    offset = end;
  }
  std::string header = absl::StrCat("{", absl::StrJoin(items, ","), "}");
  const size_t unpadded = kSafetensorsLengthBytes + header.size();
  header.append((kDataAlignment - unpadded % kDataAlignment) % kDataAlignment, ' ');
  if (header.size() > kSafetensorsHeaderBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("the header takes ", header.size(), " bytes, more than 100 MB"));
  }
  std::string preamble;
  for (int i = 0; i < kSafetensorsLengthBytes; ++i) {
    preamble.push_back(static_cast<char>(header.size() >> (8 * i) & 0xFF));
  }
  return preamble + header;
}

absl::Status WriteSafetensors(const std::filesystem::path& path,
                              absl::Span<const SafetensorsTensor> tensors,
                              const std::map<std::string, std::string>& metadata) {
  ASSIGN_OR_RETURN(std::string preamble, SafetensorsPreamble(tensors, metadata));
  for (const SafetensorsTensor& tensor : tensors) {
    if (static_cast<int64_t>(tensor.data.size()) != *TensorBytes(tensor.shape, tensor.dtype)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", QuoteForMessage(tensor.name), " has ", tensor.data.size(),
          " bytes of data, but shape ", ShapeText(tensor.shape), " of ", DTypeName(tensor.dtype),
          " takes ", *TensorBytes(tensor.shape, tensor.dtype)));
    }
  }
  static std::atomic<uint64_t> counter = 0;
  const std::string part =
      absl::StrCat(path.native(), ".part-", getpid(), "-", counter.fetch_add(1));
  int fd = open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", part));
  absl::Cleanup discard = [&] {
    if (fd >= 0) close(fd);
    unlink(part.c_str());
  };
  RETURN_IF_ERROR(WriteAll(fd, preamble, part));
  for (const SafetensorsTensor& tensor : tensors) {
    RETURN_IF_ERROR(WriteAll(
        fd,
        absl::string_view(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size()),
        part));
  }
  if (close(std::exchange(fd, -1)) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", part));
  }
  if (rename(part.c_str(), path.c_str()) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot rename ", part, " to ", path.native()));
  }
  std::move(discard).Cancel();
  return absl::OkStatus();
}

}  // namespace dlo
