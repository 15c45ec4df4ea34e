#include "loader/fault_in.h"

#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/sigbus_guard.h"

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

// Takes chunks off the common list until none is left or one has failed.
class Populator {
 public:
  explicit Populator(const std::vector<Chunk>& chunks) : chunks_(chunks) {}

  void Run() {
    for (size_t i = next_++; i < chunks_.size() && !failed_; i = next_++) {
      absl::Status status = Populate(chunks_[i]);
      if (!status.ok() && !failed_.exchange(true)) status_ = std::move(status);
    }
  }
  // After every Run has returned and been joined.
  const absl::Status& status() const { return status_; }

 private:
  const std::vector<Chunk>& chunks_;
  std::atomic<size_t> next_ = 0;
  std::atomic<bool> failed_ = false;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<FaultInStats> FaultIn(absl::Span<const PackPiece> pieces, int threads) {
  FaultInStats stats;
  std::vector<Chunk> chunks;
  for (const PackPiece& piece : pieces) {
    if (piece.file == nullptr) continue;
    for (int64_t begin = 0; begin < piece.bytes; begin += kChunkBytes) {
      chunks.push_back({&piece, begin, std::min(kChunkBytes, piece.bytes - begin)});
    }
    stats.bytes += piece.bytes;
  }
  const size_t wanted =
      threads > 0 ? static_cast<size_t>(threads) : std::thread::hardware_concurrency();
  const int64_t disk_before = DiskBytesRead();
  const absl::Time start = absl::Now();
  Populator populator(chunks);
  std::vector<std::thread> helpers;
  try {
    while (helpers.size() + 1 < std::min(wanted, chunks.size())) {
      helpers.emplace_back([&populator] { populator.Run(); });
    }
  } catch (const std::system_error& error) {
    spdlog::warn("faulting in weights with {} threads instead of {}: {}", helpers.size() + 1,
                 wanted, error.what());
  }
  populator.Run();
  for (std::thread& helper : helpers) helper.join();
  if (!populator.status().ok()) return populator.status();
  stats.time = absl::Now() - start;
  stats.disk_bytes = DiskBytesRead() - disk_before;
  stats.threads = static_cast<int>(helpers.size()) + 1;
  return stats;
}

}  // namespace dlo
