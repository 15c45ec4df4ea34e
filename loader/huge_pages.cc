#include "loader/huge_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace dlo {
namespace {

constexpr uintptr_t kHugePageBytes = 2 << 20;

struct Range {
  uintptr_t begin = 0;
  uintptr_t end = 0;
};

void Advise(Range range) {
#ifdef MADV_HUGEPAGE
  static const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  if (range.end - range.begin < kHugePageBytes) return;
  const uintptr_t begin = range.begin - range.begin % page_bytes;
  madvise(reinterpret_cast<void*>(begin), range.end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace

void AdviseHugePages(std::vector<absl::Span<const std::byte>> parts) {
  std::vector<Range> ranges;
  for (const absl::Span<const std::byte> part : parts) {
    if (part.empty()) continue;
    const auto begin = reinterpret_cast<uintptr_t>(part.data());
    ranges.push_back({begin, begin + part.size()});
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  Range together;
  for (const Range& range : ranges) {
    if (range.begin > together.end) {
      Advise(together);
      together = range;
    } else {
      together.end = std::max(together.end, range.end);
    }
  }
  Advise(together);
}

}  // namespace dlo
