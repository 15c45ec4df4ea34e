#include "loader/fault_in.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/sigbus_guard.h"
#include "base/status_macros.h"
#include "loader/chunk_threads.h"
#include "loader/huge_pages.h"

namespace dlo {
namespace {

// Large enough for the disk, small enough that threads share the work evenly.
constexpr int64_t kChunkBytes = 8 << 20;

struct Chunk {
  const PackPiece* piece = nullptr;
  int64_t begin = 0;  // in the piece
  int64_t bytes = 0;
};

int64_t DiskBytesRead() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_inblock * 512;
}

absl::Status Lost(const PackPiece& piece) {
  return piece.file->LostBytes(absl::StrCat("tensor \"", piece.tensor, "\""));
}

absl::Status Populate(const Chunk& chunk) {
  static const uintptr_t page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::byte* const begin = chunk.piece->source + chunk.begin;
#ifdef MADV_POPULATE_READ
  const uintptr_t into_page = reinterpret_cast<uintptr_t>(begin) % page_bytes;
  if (madvise(const_cast<std::byte*>(begin) - into_page, chunk.bytes + into_page,
              MADV_POPULATE_READ) == 0) {
    return absl::OkStatus();
  }
  if (errno == EFAULT || errno == EHWPOISON) return Lost(*chunk.piece);
#endif
  // A kernel before 5.14.
  std::byte byte;
  for (int64_t i = 0; i < chunk.bytes; i += static_cast<int64_t>(page_bytes)) {
    if (!GuardedCopy(&byte, begin + i, 1)) return Lost(*chunk.piece);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<FaultInStats> FaultIn(absl::Span<const PackPiece> pieces, int threads) {
  FaultInStats stats;
  std::vector<Chunk> chunks;
  std::vector<absl::Span<const std::byte>> mapped;
  for (const PackPiece& piece : pieces) {
    if (piece.file == nullptr) continue;
    mapped.emplace_back(piece.source, static_cast<size_t>(piece.bytes));
    for (int64_t begin = 0; begin < piece.bytes; begin += kChunkBytes) {
      chunks.push_back({&piece, begin, std::min(kChunkBytes, piece.bytes - begin)});
    }
    stats.bytes += piece.bytes;
  }
  AdviseHugePages(std::move(mapped));
  const int64_t disk_before = DiskBytesRead();
  const absl::Time start = absl::Now();
  ASSIGN_OR_RETURN(stats.threads,
                   RunChunks(static_cast<int64_t>(chunks.size()), threads, "faulting in weights",
                             [&](int64_t i) { return Populate(chunks[i]); }));
  stats.time = absl::Now() - start;
  stats.disk_bytes = DiskBytesRead() - disk_before;
  return stats;
}

}  // namespace dlo
