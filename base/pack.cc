#include "base/pack.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/sigbus_guard.h"
#include "base/status_macros.h"

namespace dlo {
namespace {

std::string NameOf(const PackPiece& piece) { return absl::StrCat("tensor \"", piece.tensor, "\""); }

}  // namespace

absl::Status PackPieces(std::byte* to, absl::Span<const PackPiece> pieces) {
  for (const PackPiece& piece : pieces) {
    if (piece.file == nullptr) {
      if (piece.bytes > 0) {
        std::memcpy(to + piece.offset, piece.source, static_cast<size_t>(piece.bytes));
      }
    } else if (!GuardedCopy(to + piece.offset, piece.source, piece.bytes)) {
      return piece.file->LostBytes(NameOf(piece));
    }
  }
  // After the copies: what a changed file gave is not returned as if it were the old one's.
  const MappedFile* checked = nullptr;
  for (const PackPiece& piece : pieces) {
    if (piece.file == checked || piece.file == nullptr) continue;
    checked = piece.file;
    if (!checked->CheckUnchanged().ok()) return checked->LostBytes(NameOf(piece));
  }
  return absl::OkStatus();
}

std::vector<PackPiece> ClipPieces(absl::Span<const PackPiece> pieces, int64_t begin, int64_t end) {
  std::vector<PackPiece> clipped;
  for (PackPiece piece : pieces) {
    const int64_t from = std::max(piece.offset, begin);
    const int64_t until = std::min(piece.offset + piece.bytes, end);
    if (from >= until) continue;
    piece.source += from - piece.offset;
    piece.offset = from - begin;
    piece.bytes = until - from;
    clipped.push_back(piece);
  }
  return clipped;
}

}  // namespace dlo
