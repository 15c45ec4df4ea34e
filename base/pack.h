// Putting bytes together from where files have them.
//
//   RETURN_IF_ERROR(PackPieces(buffer, pieces));                           // a whole block
//   RETURN_IF_ERROR(PackPieces(shard, ClipPieces(pieces, begin, end)));    // a rank's part of it
//
// Stateless; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/mapped_file.h"

namespace dlo {

// A piece of a block on its way from where the checkpoint has it to where the block's layout wants
// it.
struct PackPiece {
  const std::byte* source = nullptr;
  int64_t offset = 0;  // in the destination
  int64_t bytes = 0;
  // The mapping that `source` is part of, and the tensor's name for messages; null: memory of our
  // own.
  const MappedFile* file = nullptr;
  absl::string_view tensor = {};
};

// Copies each piece to `to` + offset; what no piece covers is left as it is. DATA_LOSS, naming file
// and tensor, if a file changed since it was mapped or cannot be read: what is at `to` then must
// not be used. Allocates nothing if OK.
absl::Status PackPieces(std::byte* to, absl::Span<const PackPiece> pieces);

// What of the pieces falls into the bytes [begin, end) of their destination, with offsets from
// `begin`.
std::vector<PackPiece> ClipPieces(absl::Span<const PackPiece> pieces, int64_t begin, int64_t end);

}  // namespace dlo
