#include "runtime/pinned_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dlo {

absl::StatusOr<std::unique_ptr<PinnedMemory>> PinnedMemory::Allocate(int64_t bytes, PinCalls calls,
                                                                     int64_t piece_bytes) {
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("a buffer of ", bytes, " bytes"));
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  const int64_t mapped_bytes =
      (std::max<int64_t>(bytes, 1) + page_bytes - 1) / page_bytes * page_bytes;
  void* data =
      mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot allocate ", bytes, " bytes to pin: ", std::strerror(errno)));
  }
  std::unique_ptr<PinnedMemory> memory(new PinnedMemory(
      static_cast<std::byte*>(data), bytes, mapped_bytes, std::move(calls), piece_bytes));
  for (int64_t begin = 0; begin < mapped_bytes; begin += piece_bytes) {
    const int64_t piece = std::min(piece_bytes, mapped_bytes - begin);
    if (absl::Status status = memory->calls_.pin(memory->data_ + begin, piece); !status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat("cannot pin ", bytes, " bytes of host memory (", begin,
                                       " are, the next ", piece, " are not): ", status.message()));
    }
    ++memory->num_pinned_;
  }
  return memory;
}

PinnedMemory::~PinnedMemory() {
  bool all = true;
  while (num_pinned_ > 0) {
    if (!calls_.unpin(data_ + --num_pinned_ * piece_bytes_).ok()) all = false;
  }
  if (all) munmap(data_, mapped_bytes_);
}

}  // namespace dlo
