#include "loader/weights.h"

#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "loader/cast.h"
#include "loader/messages.h"

namespace dlo {
namespace {

// Large enough that system calls cost nothing beside the copy, small enough to stay in a core's
// cache.
constexpr int64_t kChunkBytes = 1 << 20;

// One tensor's way from the checkpoint to its destination.
struct Transfer {
  TensorSource source;
  DType dtype = DType::kF32;
  std::byte* destination = nullptr;
};

// A run of elements of one transfer: the unit of work.
struct Chunk {
  const Transfer* transfer = nullptr;
  int64_t first = 0;
  int64_t count = 0;
};

std::optional<TensorSource> FindSpec(const Checkpoint& checkpoint, const TensorSpec& spec) {
  std::optional<TensorSource> source = checkpoint.Find(spec.name);
  for (const std::string& alias : spec.aliases) {
    if (source) break;
    source = checkpoint.Find(alias);
  }
  return source;
}

// Compares the model's list with the checkpoint's in both directions.
absl::StatusOr<std::vector<Transfer>> PlanTransfers(const Checkpoint& checkpoint,
                                                    absl::Span<const TensorSpec> specs,
                                                    absl::Span<std::byte* const> destinations,
                                                    const LoadOptions& options) {
  if (specs.size() != destinations.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(specs.size(), " tensors to load, but ", destinations.size(), " destinations"));
  }
  std::vector<Transfer> transfers;
  std::set<absl::string_view> claimed, names;
  Offenders missing, unexpected, misshapen, uncastable, repeated, homeless;
  for (size_t i = 0; i < specs.size(); ++i) {
    const TensorSpec& spec = specs[i];
    if (!names.insert(spec.name).second) repeated.Add(QuoteForMessage(spec.name));
    claimed.insert(spec.name);
    claimed.insert(spec.aliases.begin(), spec.aliases.end());
    std::optional<TensorSource> source = FindSpec(checkpoint, spec);
    if (!source) {
      missing.Add(QuoteForMessage(spec.name));
      continue;
    }
    const std::string where = absl::StrCat(QuoteForMessage(spec.name), " in ", source->file);
    if (source->shape != absl::MakeConstSpan(spec.shape)) {
      misshapen.Add(absl::StrCat(where, " is ", ShapeText(source->shape), " instead of ",
                                 ShapeText(spec.shape)));
      continue;
    }
    if (!CanCast(source->dtype, spec.dtype)) {
      uncastable.Add(absl::StrCat(where, " is ", DTypeName(source->dtype), ", wanted as ",
                                  DTypeName(spec.dtype)));
    }
    if (destinations[i] == nullptr && !source->data.empty()) {
      homeless.Add(QuoteForMessage(spec.name));
    }
    transfers.push_back({*source, spec.dtype, destinations[i]});
  }
  for (const std::string& name : checkpoint.names()) {
    const bool ignored =
        options.partial ||
        std::any_of(options.ignore_unexpected.begin(), options.ignore_unexpected.end(),
                    [&name](const std::string& part) { return absl::StrContains(name, part); });
    if (claimed.count(name) == 0 && !ignored) {
      unexpected.Add(absl::StrCat(QuoteForMessage(name), " in ", checkpoint.Find(name)->file));
    }
  }

  std::vector<std::string> problems;
  const std::pair<const Offenders&, absl::string_view> kinds[] = {
      {missing, "tensors are missing"},
      {unexpected, "tensors are not the model's"},
      {misshapen, "tensors have another shape"},
      {uncastable, "tensors have a dtype that cannot be cast"},
      {repeated, "tensors are asked for twice"},
      {homeless, "tensors have no destination"},
  };
  for (const auto& [offenders, text] : kinds) {
    if (!offenders.empty()) problems.push_back(absl::StrCat(text, ", ", offenders.Text()));
  }
  if (problems.empty()) return transfers;
  return absl::InvalidArgumentError(
      absl::StrCat("the weights in ", checkpoint.dir().native(),
                   " do not fit the model: ", absl::StrJoin(problems, "; ")));
}

std::vector<Chunk> SplitIntoChunks(const std::vector<Transfer>& transfers) {
  std::vector<Chunk> chunks;
  for (const Transfer& transfer : transfers) {
    const int64_t element_bytes = DTypeBytes(transfer.source.dtype);
    const int64_t total = static_cast<int64_t>(transfer.source.data.size()) / element_bytes;
    const int64_t step = kChunkBytes / element_bytes;
    for (int64_t first = 0; first < total; first += step) {
      chunks.push_back({&transfer, first, std::min(step, total - first)});
    }
  }
  return chunks;
}

// The whole pages that `data`, part of a file's mapping, touches.
absl::Span<std::byte> PagesOf(absl::Span<const std::byte> data) {
  static const uintptr_t page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t into_page = reinterpret_cast<uintptr_t>(data.data()) % page_bytes;
  const size_t bytes = into_page + data.size();
  return absl::MakeSpan(const_cast<std::byte*>(data.data()) - into_page,
                        (bytes + page_bytes - 1) / page_bytes * page_bytes);
}

absl::Status LoadChunk(const Chunk& chunk) {
  const Transfer& transfer = *chunk.transfer;
  const int64_t in_bytes = DTypeBytes(transfer.source.dtype);
  const absl::Span<const std::byte> data = transfer.source.data.subspan(
      static_cast<size_t>(chunk.first * in_bytes), static_cast<size_t>(chunk.count * in_bytes));
  const absl::Span<std::byte> pages = PagesOf(data);
#ifdef MADV_POPULATE_READ
  // One call instead of a fault per page; and where the file has shrunk or its disk fails, an error
  // instead of SIGBUS. A kernel that does not know it (EINVAL) just faults.
  if (madvise(pages.data(), pages.size(), MADV_POPULATE_READ) != 0 &&
      (errno == EFAULT || errno == EHWPOISON)) {
    return transfer.source.mapping->LostBytes(
        absl::StrCat("tensor ", QuoteForMessage(transfer.source.name)));
  }
#endif
  CastElements(transfer.source.dtype, data.data(), transfer.dtype,
               transfer.destination + chunk.first * DTypeBytes(transfer.dtype),
               static_cast<size_t>(chunk.count));
  // Another thread may be reading a neighbour on a page at either end: it faults that page in
  // again.
  madvise(pages.data(), pages.size(), MADV_DONTNEED);
  return absl::OkStatus();
}

// Takes chunks off the common list until none is left or one has failed.
class ChunkRunner {
 public:
  // `read_bytes`, unless null, counts.
  ChunkRunner(const std::vector<Chunk>& chunks, std::atomic<int64_t>* read_bytes)
      : chunks_(chunks), read_bytes_(read_bytes) {}

  void Run() {
    for (size_t i = next_++; i < chunks_.size() && !failed_; i = next_++) {
      absl::Status status = LoadChunk(chunks_[i]);
      if (read_bytes_ != nullptr) {
        *read_bytes_ += chunks_[i].count * DTypeBytes(chunks_[i].transfer->source.dtype);
      }
      if (!status.ok() && !failed_.exchange(true)) status_ = std::move(status);
    }
  }
  // After every Run has returned and been joined.
  const absl::Status& status() const { return status_; }

 private:
  const std::vector<Chunk>& chunks_;
  std::atomic<int64_t>* const read_bytes_;
  std::atomic<size_t> next_ = 0;
  std::atomic<bool> failed_ = false;
  absl::Status status_;
};

}  // namespace

absl::Status CheckTensors(const Checkpoint& checkpoint, absl::Span<const TensorSpec> specs,
                          const LoadOptions& options) {
  // The plan only asks whether there is a destination.
  std::byte nowhere;
  const std::vector<std::byte*> destinations(specs.size(), &nowhere);
  return PlanTransfers(checkpoint, specs, destinations, options).status();
}

absl::Status LoadTensors(const Checkpoint& checkpoint, absl::Span<const TensorSpec> specs,
                         absl::Span<std::byte* const> destinations, const LoadOptions& options) {
  ASSIGN_OR_RETURN(std::vector<Transfer> transfers,
                   PlanTransfers(checkpoint, specs, destinations, options));
  const std::vector<Chunk> chunks = SplitIntoChunks(transfers);
  const size_t wanted = options.threads > 0 ? static_cast<size_t>(options.threads)
                                            : std::thread::hardware_concurrency();
  ChunkRunner runner(chunks, options.read_bytes);
  std::vector<std::thread> helpers;
  try {
    while (helpers.size() + 1 < std::min(wanted, chunks.size())) {
      helpers.emplace_back([&runner] { runner.Run(); });
    }
  } catch (const std::system_error& error) {
    spdlog::warn("loading weights with {} threads instead of {}: {}", helpers.size() + 1, wanted,
                 error.what());
  }
  runner.Run();
  for (std::thread& helper : helpers) helper.join();
  RETURN_IF_ERROR(runner.status());
  for (const SafetensorsFile& file : checkpoint.files()) {
    RETURN_IF_ERROR(file.mapping().CheckUnchanged());
  }
  return absl::OkStatus();
}

}  // namespace dlo
