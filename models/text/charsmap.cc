#include "models/text/charsmap.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "models/text/unicode.h"

namespace dlo {
namespace {

uint32_t LittleEndian32(absl::string_view bytes, size_t at) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) {
    value |= static_cast<uint32_t>(static_cast<unsigned char>(bytes[at + i])) << (8 * i);
  }
  return value;
}

// A Darts-clone unit: bits 0-7 and 31 are the label, bit 8 says that a value hangs here, bits 10-30
// are the offset to the children, shifted by 8 more if bit 9 is set. In a value's unit bits 0-30
// are the value.
uint32_t Label(uint32_t unit) { return unit & 0x800000FFU; }
bool HasValue(uint32_t unit) { return ((unit >> 8) & 1) != 0; }
size_t Offset(uint32_t unit) { return static_cast<size_t>(unit >> 10) << ((unit & 0x200U) >> 6); }
size_t Value(uint32_t unit) { return unit & 0x7FFFFFFFU; }

}  // namespace

absl::StatusOr<Charsmap> Charsmap::Parse(absl::string_view blob) {
  if (blob.size() < 4) {
    return absl::InvalidArgumentError(
        absl::StrCat("has ", blob.size(), " bytes, too few for the size of its trie"));
  }
  const size_t trie_bytes = LittleEndian32(blob, 0);
  blob.remove_prefix(4);
  if (trie_bytes > blob.size() || trie_bytes % 4 != 0 || trie_bytes == 0) {
    return absl::InvalidArgumentError(absl::StrCat("says that its trie has ", trie_bytes,
                                                   " bytes, but ", blob.size(), " bytes follow"));
  }
  Charsmap map;
  map.units_.reserve(trie_bytes / 4);
  for (size_t at = 0; at < trie_bytes; at += 4) map.units_.push_back(LittleEndian32(blob, at));
  map.replacements_ = std::string(blob.substr(trie_bytes));
  return map;
}

std::optional<std::string_view> Charsmap::Lookup(absl::string_view text) const {
  size_t node = Offset(units_[0]);
  for (char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    node ^= byte;
    if (byte == 0 || node >= units_.size() || Label(units_[node]) != byte) return std::nullopt;
    const uint32_t unit = units_[node];
    node ^= Offset(unit);
    if (!HasValue(unit)) continue;
    if (node >= units_.size() || Value(units_[node]) > replacements_.size()) return std::nullopt;
    std::string_view replacement = std::string_view(replacements_).substr(Value(units_[node]));
    return replacement.substr(0, replacement.find('\0'));
  }
  return std::nullopt;
}

std::string Charsmap::Normalize(absl::string_view text) const {
  constexpr size_t kClusterBytesMax = 5;
  std::string out;
  out.reserve(text.size());
  const std::vector<size_t> boundaries = GraphemeBoundaries(text);
  for (size_t i = 0; i + 1 < boundaries.size(); ++i) {
    const absl::string_view cluster = text.substr(boundaries[i], boundaries[i + 1] - boundaries[i]);
    if (cluster.size() <= kClusterBytesMax) {
      if (auto replacement = Lookup(cluster)) {
        out.append(*replacement);
        continue;
      }
    }
    for (size_t pos = 0; pos < cluster.size();) {
      const size_t start = pos;
      NextCodePoint(cluster, pos);
      const absl::string_view point = cluster.substr(start, pos - start);
      if (auto replacement = Lookup(point)) {
        out.append(*replacement);
      } else {
        out.append(point.data(), point.size());
      }
    }
  }
  return out;
}

}  // namespace dlo
