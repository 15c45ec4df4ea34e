#include "tests/fuzz/safetensors_fuzz.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "loader/checkpoint.h"
#include "loader/safetensors.h"

namespace dlo {
namespace {

void Promise(bool kept, const char* what) {
  if (kept) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

void CheckRefusal(const absl::Status& status) {
  Promise(status.code() == absl::StatusCode::kInvalidArgument, "a refusal is INVALID_ARGUMENT");
  Promise(status.message().find("input") != absl::string_view::npos, "it names the file");
  Promise(status.message().size() < 4096, "it stays short");
}

bool SameTensors(const SafetensorsHeader& a, const SafetensorsHeader& b, int64_t shift) {
  return std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(),
                    [shift](const auto& x, const auto& y) {
                      return x.first == y.first && x.second.dtype == y.second.dtype &&
                             x.second.shape == y.second.shape && x.second.bytes == y.second.bytes &&
                             x.second.offset + shift == y.second.offset;
                    });
}

void CheckHeader(const SafetensorsHeader& header, int64_t data_offset, int64_t file_size) {
  std::vector<SafetensorsTensor> layout;
  int64_t covered = 0;
  for (const auto& [name, entry] : header.tensors) {
    Promise(
        entry.offset >= data_offset && entry.bytes >= 0 && entry.offset + entry.bytes <= file_size,
        "ranges lie inside the file");
    __int128 bytes = DTypeBytes(entry.dtype);
    for (int64_t size : entry.shape) {
      Promise(size >= 0, "sizes are not negative");
      bytes *= size;
    }
    Promise(bytes == entry.bytes, "shape and dtype give the range's length");
    covered += entry.bytes;
    layout.push_back({name, entry.dtype, entry.shape, {}});
  }
  Promise(covered == file_size - data_offset, "tensors cover the data");

  // What was read can be written, and reads the same again.
  if (header.tensors.count("") != 0) return;  // the writer wants names
  std::sort(layout.begin(), layout.end(), [&](const auto& a, const auto& b) {
    const SafetensorsEntry& x = header.tensors.at(a.name);
    const SafetensorsEntry& y = header.tensors.at(b.name);
    return std::pair(x.offset, x.bytes) < std::pair(y.offset, y.bytes);
  });
  absl::StatusOr<std::string> preamble = SafetensorsPreamble(layout, header.metadata);
  Promise(preamble.ok(), "what was read can be written");
  const int64_t size = static_cast<int64_t>(preamble->size());
  absl::StatusOr<SafetensorsHeader> again = ParseSafetensorsHeader(
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(preamble->data()), preamble->size()),
      size + covered, "input");
  Promise(again.ok(), "what was written can be read");
  Promise(SameTensors(header, *again, size - data_offset), "tensors survive a round trip");
  Promise(header.metadata == again->metadata, "metadata survives a round trip");
}

// A copy of exactly these bytes, so that a read past the end is seen by the address sanitizer.
bool RunHeader(const std::vector<std::byte>& prefix, int64_t file_size) {
  absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(prefix, file_size, "input");
  if (!header.ok()) {
    CheckRefusal(header.status());
    return false;
  }
  uint64_t length = 0;
  std::memcpy(&length, prefix.data(), sizeof(length));
  CheckHeader(*header, 8 + static_cast<int64_t>(length), file_size);
  return true;
}

}  // namespace

bool RunSafetensorsFile(absl::Span<const std::byte> data) {
  return RunHeader(std::vector<std::byte>(data.begin(), data.end()),
                   static_cast<int64_t>(data.size()));
}

bool RunSafetensorsJson(absl::Span<const std::byte> data) {
  constexpr int64_t kDataBytes = 16;
  const uint64_t length = data.size();
  std::vector<std::byte> prefix(8 + data.size());
  std::memcpy(prefix.data(), &length, sizeof(length));
  std::copy(data.begin(), data.end(), prefix.begin() + 8);
  return RunHeader(prefix, static_cast<int64_t>(prefix.size()) + kDataBytes);
}

bool RunSafetensorsIndex(absl::Span<const std::byte> data) {
  const std::string json(reinterpret_cast<const char*>(data.data()), data.size());
  auto map = ParseSafetensorsIndex(json, "input");
  if (!map.ok()) {
    CheckRefusal(map.status());
    return false;
  }
  Promise(!map->empty(), "an index lists something");
  for (const auto& [tensor, file] : *map) {
    const std::filesystem::path path(file);
    Promise(!file.empty() && file.find('\0') == file.npos, "a file name is one");
    Promise(path.is_relative() && path.lexically_normal() == path, "a file name is plain");
    for (const auto& part : path) Promise(part != "..", "a file lies inside the folder");
  }
  return true;
}

}  // namespace dlo
