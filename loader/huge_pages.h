// Pages of 2 MiB for what is about to be read from the mapping of a file. Internal to loader/.
//
//   AdviseHugePages({first.source.data, second.source.data});
//
// What Linux then reads from the disk lies in the page cache in pieces of 2 MiB, each of which a
// process maps at once, where file system and kernel can (ext4 since 6.16, XFS, btrfs). Piecemeal,
// mapping costs a processor half as much as casting what is mapped. Pieces that are in the cache
// stay as they are. Advice: nothing is said where it is not followed.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/types/span.h"

namespace dlo {

// Parts of mappings, in any order. Those without a gap between them count as one; what is shorter
// than 2 MiB stays as it is, as reading 2 MiB around it would read what nobody asks for.
void AdviseHugePages(std::vector<absl::Span<const std::byte>> parts);

}  // namespace dlo
