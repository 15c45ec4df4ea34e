#include "loader/weights.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "loader/cast.h"
#include "loader/chunk_threads.h"
#include "loader/huge_pages.h"
#include "loader/messages.h"
#include "loader/quantize.h"

namespace dlo {
namespace {

// Bytes of a file that are worked on at once, by address from multiple to multiple. What Linux maps
// at a fault, and what it reads from the page cache as one, ends there at the latest: so threads
// seldom take pages from each other.
constexpr int64_t kChunkBytes = 2 << 20;

// The elements of a source that are needed: `num` runs of `run` elements, each `stride` elements
// after the one before, the first at `first`.
struct Runs {
  int64_t first = 0;
  int64_t run = 0;
  int64_t stride = 0;
  int64_t num = 0;
};

struct ScaleGroup;

// One tensor's way from the checkpoint to its destination.
struct Transfer {
  TensorSource source;
  DType dtype = DType::kF32;
  std::byte* destination = nullptr;
  Runs runs;
  ScaleGroup* group = nullptr;  // of a tensor that is quantised
  bool part = false;            // of the source; the rest is not read
};

// Tensors that are quantised with one scale.
struct ScaleGroup {
  std::byte* destination = nullptr;  // of the scale
  // Chunks whose magnitudes are still to be seen, and the largest so far.
  std::atomic<int> chunks_left = 0;
  std::atomic<uint32_t> max_magnitude_bits = 0;
  std::atomic<bool> failed = false;
};

// All that a call does. Groups stay where they are.
struct LoadPlan {
  std::vector<Transfer> transfers;
  std::vector<std::unique_ptr<ScaleGroup>> groups;
};

// Some elements of one transfer: the unit of work. Of the runs `first_run` and following,
// `num_runs` of them, the elements `begin` to `begin` + `count` of each.
struct Chunk {
  enum class Task { kLoad, kMeasure, kQuantize };
  const Transfer* transfer = nullptr;
  int64_t first_run = 0;
  int64_t num_runs = 0;
  int64_t begin = 0;
  int64_t count = 0;
  Task task = Task::kLoad;
};

std::optional<TensorSource> FindSpec(const Checkpoint& checkpoint, const TensorSpec& spec) {
  std::optional<TensorSource> source = checkpoint.Find(spec.name);
  for (const std::string& alias : spec.aliases) {
    if (source) break;
    source = checkpoint.Find(alias);
  }
  return source;
}

std::vector<int64_t> FullShape(const TensorSpec& spec) {
  std::vector<int64_t> shape = spec.shape;
  if (spec.slice) shape[spec.slice->dim] = spec.slice->full;
  return shape;
}

// What is wrong with a spec's slice in itself, or empty.
std::string SliceProblem(const TensorSpec& spec) {
  const TensorSlice& slice = *spec.slice;
  if (slice.dim < 0 || slice.dim >= static_cast<int>(spec.shape.size())) {
    return absl::StrCat("is cut along dimension ", slice.dim, " of ", spec.shape.size());
  }
  const int64_t length = spec.shape[slice.dim];
  if (slice.begin >= 0 && length >= 0 && slice.begin <= slice.full - length) return "";
  return absl::StrCat("takes ", slice.begin, " to ", slice.begin + length, " of the ", slice.full,
                      " in dimension ", slice.dim);
}

Runs RunsOf(const TensorSpec& spec) {
  if (!spec.slice) return {0, spec.num_elements(), 0, 1};
  int64_t inner = 1, outer = 1;
  for (int i = 0; i < static_cast<int>(spec.shape.size()); ++i) {
    (i < spec.slice->dim ? outer : inner) *= i == spec.slice->dim ? 1 : spec.shape[i];
  }
  return {spec.slice->begin * inner, spec.shape[spec.slice->dim] * inner, spec.slice->full * inner,
          outer};
}

// Finds the specs that are scales of others, and what is wrong with those others.
class Scales {
 public:
  Scales(absl::Span<const TensorSpec> specs, absl::Span<std::byte* const> destinations,
         Offenders* bad) {
    for (const TensorSpec& spec : specs) {
      if (!spec.scale.empty()) groups_.emplace(spec.scale, nullptr);
    }
    for (size_t i = 0; i < specs.size(); ++i) {
      const auto group = groups_.find(specs[i].name);
      if (group == groups_.end()) continue;
      if (specs[i].dtype != DType::kF32 || specs[i].num_elements() != 1) {
        bad->Add(absl::StrCat(QuoteForMessage(specs[i].name), " is a scale, but not one F32"));
      }
      group->second = std::make_unique<ScaleGroup>();
      group->second->destination = destinations[i];
    }
    for (const TensorSpec& spec : specs) {
      if (spec.scale.empty()) continue;
      if (groups_[spec.scale] == nullptr) {
        bad->Add(absl::StrCat(QuoteForMessage(spec.name), " has the scale ",
                              QuoteForMessage(spec.scale), ", which is not asked for"));
      }
      if (spec.dtype != DType::kF8E4M3) {
        bad->Add(absl::StrCat(QuoteForMessage(spec.name), " has a scale, but is ",
                              DTypeName(spec.dtype)));
      }
    }
  }

  bool IsScale(const TensorSpec& spec) const { return groups_.contains(spec.name); }
  ScaleGroup* GroupOf(const TensorSpec& spec) const {
    return spec.scale.empty() ? nullptr : groups_.find(spec.scale)->second.get();
  }
  std::vector<std::unique_ptr<ScaleGroup>> Take() {
    std::vector<std::unique_ptr<ScaleGroup>> groups;
    for (auto& [name, group] : groups_) groups.push_back(std::move(group));
    return groups;
  }

 private:
  std::map<absl::string_view, std::unique_ptr<ScaleGroup>> groups_;  // by the scale's name
};

// Compares the model's list with the checkpoint's in both directions.
absl::StatusOr<LoadPlan> PlanTransfers(const Checkpoint& checkpoint,
                                       absl::Span<const TensorSpec> specs,
                                       absl::Span<std::byte* const> destinations,
                                       const LoadOptions& options) {
  if (specs.size() != destinations.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(specs.size(), " tensors to load, but ", destinations.size(), " destinations"));
  }
  LoadPlan plan;
  std::set<absl::string_view> claimed, names;
  Offenders missing, unexpected, misshapen, cut, uncastable, scaled, repeated, homeless;
  Scales scales(specs, destinations, &scaled);
  for (size_t i = 0; i < specs.size(); ++i) {
    const TensorSpec& spec = specs[i];
    if (!names.insert(spec.name).second) repeated.Add(QuoteForMessage(spec.name));
    if (destinations[i] == nullptr && spec.num_elements() > 0) {
      homeless.Add(QuoteForMessage(spec.name));
    }
    if (scales.IsScale(spec)) continue;
    claimed.insert(spec.name);
    claimed.insert(spec.aliases.begin(), spec.aliases.end());
    std::optional<TensorSource> source = FindSpec(checkpoint, spec);
    if (!source) {
      missing.Add(QuoteForMessage(spec.name));
      continue;
    }
    const std::string where = absl::StrCat(QuoteForMessage(spec.name), " in ", source->file);
    if (spec.slice) {
      if (const std::string problem = SliceProblem(spec); !problem.empty()) {
        cut.Add(absl::StrCat(where, " ", problem));
        continue;
      }
    }
    if (const std::vector<int64_t> full = FullShape(spec);
        source->shape != absl::MakeConstSpan(full)) {
      misshapen.Add(
          absl::StrCat(where, " is ", ShapeText(source->shape), " instead of ", ShapeText(full)));
      continue;
    }
    if (spec.scale.empty() ? !CanCast(source->dtype, spec.dtype) : !CanQuantize(source->dtype)) {
      uncastable.Add(absl::StrCat(where, " is ", DTypeName(source->dtype), ", wanted as ",
                                  DTypeName(spec.dtype),
                                  spec.scale.empty() ? "" : " by quantising"));
    }
    plan.transfers.push_back({.source = *source,
                              .dtype = spec.dtype,
                              .destination = destinations[i],
                              .runs = RunsOf(spec),
                              .group = scales.GroupOf(spec),
                              .part = spec.slice.has_value()});
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
      {cut, "tensors have a slice that is no part of them"},
      {uncastable, "tensors have a dtype that cannot be cast"},
      {scaled, "tensors cannot be quantised"},
      {repeated, "tensors are asked for twice"},
      {homeless, "tensors have no destination"},
  };
  for (const auto& [offenders, text] : kinds) {
    if (!offenders.empty()) problems.push_back(absl::StrCat(text, ", ", offenders.Text()));
  }
  if (!problems.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the weights in ", checkpoint.dir().native(),
                     " do not fit the model: ", absl::StrJoin(problems, "; ")));
  }
  plan.groups = scales.Take();
  return plan;
}

void AddChunks(const Transfer& transfer, Chunk::Task task, std::vector<Chunk>* chunks) {
  const Runs& runs = transfer.runs;
  const int64_t element_bytes = DTypeBytes(transfer.source.dtype);
  if (runs.run == 0) return;
  const auto add = [&](int64_t first_run, int64_t num_runs, int64_t begin, int64_t count) {
    chunks->push_back({.transfer = &transfer,
                       .first_run = first_run,
                       .num_runs = num_runs,
                       .begin = begin,
                       .count = count,
                       .task = task});
  };
  if (const int64_t at_once = kChunkBytes / (runs.run * element_bytes); at_once > 1) {
    for (int64_t i = 0; i < runs.num; i += at_once) {
      add(i, std::min(at_once, runs.num - i), 0, runs.run);
    }
    return;
  }
  for (int64_t i = 0; i < runs.num; ++i) {
    const auto run = reinterpret_cast<uintptr_t>(transfer.source.data.data()) +
                     static_cast<uintptr_t>((runs.first + i * runs.stride) * element_bytes);
    for (int64_t begin = 0; begin < runs.run;) {
      const uintptr_t address = run + static_cast<uintptr_t>(begin * element_bytes);
      const auto to_boundary = static_cast<int64_t>(kChunkBytes - address % kChunkBytes);
      const int64_t count =
          std::min((to_boundary + element_bytes - 1) / element_bytes, runs.run - begin);
      add(i, 1, begin, count);
      begin += count;
    }
  }
}

// From front to back of each file, but for the tensors of a group, which stay together. A group's
// chunks are quantised after the next group's have been measured, so that threads seldom wait.
std::vector<Chunk> SplitIntoChunks(const LoadPlan& plan) {
  std::vector<const Transfer*> order;
  std::map<const ScaleGroup*, std::vector<const Transfer*>> members;
  for (const Transfer& transfer : plan.transfers) order.push_back(&transfer);
  std::stable_sort(order.begin(), order.end(), [](const Transfer* a, const Transfer* b) {
    return std::less<>()(a->source.data.data(), b->source.data.data());
  });
  for (const Transfer* transfer : order) {
    if (transfer->group != nullptr) members[transfer->group].push_back(transfer);
  }
  std::vector<Chunk> chunks;
  ScaleGroup* measured = nullptr;
  const auto quantize_measured = [&] {
    if (measured == nullptr) return;
    for (const Transfer* member : members[measured]) {
      AddChunks(*member, Chunk::Task::kQuantize, &chunks);
    }
  };
  for (const Transfer* transfer : order) {
    if (transfer->group == nullptr) {
      AddChunks(*transfer, Chunk::Task::kLoad, &chunks);
    } else if (transfer == members[transfer->group].front()) {
      const size_t before = chunks.size();
      for (const Transfer* member : members[transfer->group]) {
        AddChunks(*member, Chunk::Task::kMeasure, &chunks);
      }
      transfer->group->chunks_left = static_cast<int>(chunks.size() - before);
      quantize_measured();
      measured = transfer->group;
    }
  }
  quantize_measured();
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

// The bytes of the chunk's elements of one of its runs.
absl::Span<const std::byte> RunData(const Chunk& chunk, int64_t run) {
  const Transfer& transfer = *chunk.transfer;
  const int64_t element_bytes = DTypeBytes(transfer.source.dtype);
  const int64_t first = transfer.runs.first + run * transfer.runs.stride + chunk.begin;
  return transfer.source.data.subspan(static_cast<size_t>(first * element_bytes),
                                      static_cast<size_t>(chunk.count * element_bytes));
}

// The pages of a chunk, as stretches that do not touch each other.
std::vector<absl::Span<std::byte>> PagesOf(const Chunk& chunk) {
  std::vector<absl::Span<std::byte>> stretches;
  for (int64_t run = chunk.first_run; run < chunk.first_run + chunk.num_runs; ++run) {
    const absl::Span<std::byte> pages = PagesOf(RunData(chunk, run));
    if (stretches.empty() || stretches.back().end() < pages.begin()) {
      stretches.push_back(pages);
    } else {
      absl::Span<std::byte>& last = stretches.back();
      last = absl::MakeSpan(last.data(), pages.end() - last.data());
    }
  }
  return stretches;
}

absl::Status Populate(const Transfer& transfer, absl::Span<const absl::Span<std::byte>> stretches) {
  if (transfer.part) {
    // All at once, as without read-ahead each would be waited for alone.
    for (const absl::Span<std::byte> pages : stretches) {
      madvise(pages.data(), pages.size(), MADV_WILLNEED);
    }
  }
#ifdef MADV_POPULATE_READ
  for (const absl::Span<std::byte> pages : stretches) {
    // One call instead of a fault per page; and where the file has shrunk or its disk fails, an
    // error instead of SIGBUS. A kernel that does not know it (EINVAL) just faults.
    if (madvise(pages.data(), pages.size(), MADV_POPULATE_READ) != 0 &&
        (errno == EFAULT || errno == EHWPOISON)) {
      return transfer.source.mapping->LostBytes(
          absl::StrCat("tensor ", QuoteForMessage(transfer.source.name)));
    }
  }
#endif
  return absl::OkStatus();
}

absl::Status Measure(const Chunk& chunk) {
  const Transfer& transfer = *chunk.transfer;
  ScaleGroup& group = *transfer.group;
  uint32_t max = 0;
  for (int64_t run = chunk.first_run; run < chunk.first_run + chunk.num_runs; ++run) {
    max = std::max(max, MaxMagnitudeBits(transfer.source.dtype, RunData(chunk, run).data(),
                                         static_cast<size_t>(chunk.count)));
  }
  uint32_t seen = group.max_magnitude_bits;
  while (seen < max && !group.max_magnitude_bits.compare_exchange_weak(seen, max)) {
  }
  if (IsFiniteMagnitude(max)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("tensor ", QuoteForMessage(transfer.source.name), " in ", transfer.source.file,
                   " holds a value that is not finite, so that it cannot be quantised"));
}

void EndMeasuring(ScaleGroup& group, bool ok) {
  if (!ok) group.failed = true;
  if (--group.chunks_left == 0) group.chunks_left.notify_all();
}

void Convert(const Chunk& chunk) {
  const Transfer& transfer = *chunk.transfer;
  const float scale = transfer.group != nullptr ? E4M3Scale(transfer.group->max_magnitude_bits) : 1;
  const auto count = static_cast<size_t>(chunk.count);
  for (int64_t run = chunk.first_run; run < chunk.first_run + chunk.num_runs; ++run) {
    const std::byte* from = RunData(chunk, run).data();
    std::byte* to =
        transfer.destination + (run * transfer.runs.run + chunk.begin) * DTypeBytes(transfer.dtype);
    if (transfer.group != nullptr) {
      QuantizeE4M3(transfer.source.dtype, from, scale, to, count);
    } else {
      CastElements(transfer.source.dtype, from, transfer.dtype, to, count);
    }
  }
}

// Takes the pages of the chunk, and what Linux has mapped around them, out of the process. Another
// thread may be reading a neighbour: it faults those pages in again.
void DropPages(const Transfer& transfer, absl::Span<const absl::Span<std::byte>> stretches) {
  const absl::Span<const std::byte> file = transfer.source.mapping->bytes();
  const auto file_begin = reinterpret_cast<uintptr_t>(file.data());
  const auto begin = reinterpret_cast<uintptr_t>(stretches.front().data());
  const auto end = reinterpret_cast<uintptr_t>(stretches.back().data()) + stretches.back().size();
  const uintptr_t from = std::max(begin - begin % kChunkBytes, file_begin);
  const uintptr_t to = std::min(end + kChunkBytes - 1 - (end - 1) % kChunkBytes,
                                file_begin + static_cast<uintptr_t>(file.size()));
  madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
}

absl::Status LoadChunk(const Chunk& chunk) {
  ScaleGroup* const group = chunk.transfer->group;
  if (chunk.task == Chunk::Task::kQuantize) {
    for (int left = group->chunks_left; left != 0; left = group->chunks_left) {
      group->chunks_left.wait(left);
    }
    if (group->failed) return absl::OkStatus();  // told by the chunk that failed
  }
  const std::vector<absl::Span<std::byte>> stretches = PagesOf(chunk);
  absl::Status status = Populate(*chunk.transfer, stretches);
  if (status.ok()) {
    if (chunk.task == Chunk::Task::kMeasure) {
      status = Measure(chunk);
    } else {
      Convert(chunk);
    }
  }
  if (chunk.task == Chunk::Task::kMeasure) EndMeasuring(*group, status.ok());
  DropPages(*chunk.transfer, stretches);
  return status;
}

void AdviseHugePagesOfWholes(const LoadPlan& plan) {
  std::vector<absl::Span<const std::byte>> wholes;
  for (const Transfer& transfer : plan.transfers) {
    if (!transfer.part) wholes.push_back(transfer.source.data);
  }
  AdviseHugePages(std::move(wholes));
}

// Read-ahead would bring in what lies between the parts.
void SetReadAheadOfParts(const LoadPlan& plan, bool on) {
  for (const Transfer& transfer : plan.transfers) {
    if (!transfer.part || transfer.source.data.empty()) continue;
    const absl::Span<std::byte> pages = PagesOf(transfer.source.data);
    madvise(pages.data(), pages.size(), on ? MADV_NORMAL : MADV_RANDOM);
  }
}

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
  ASSIGN_OR_RETURN(const LoadPlan plan, PlanTransfers(checkpoint, specs, destinations, options));
  const std::vector<Chunk> chunks = SplitIntoChunks(plan);
  AdviseHugePagesOfWholes(plan);
  SetReadAheadOfParts(plan, false);
  const absl::Cleanup read_ahead = [&plan] { SetReadAheadOfParts(plan, true); };
  RETURN_IF_ERROR(RunChunks(static_cast<int64_t>(chunks.size()), options.threads, "loading weights",
                            [&](int64_t i) {
                              const Chunk& chunk = chunks[i];
                              if (options.read_bytes != nullptr &&
                                  chunk.task != Chunk::Task::kQuantize) {
                                *options.read_bytes += chunk.num_runs * chunk.count *
                                                       DTypeBytes(chunk.transfer->source.dtype);
                              }
                              return LoadChunk(chunk);
                            })
                      .status());
  for (const auto& group : plan.groups) {
    const float scale = E4M3Scale(group->max_magnitude_bits);
    std::memcpy(group->destination, &scale, sizeof(scale));
  }
  for (const SafetensorsFile& file : checkpoint.files()) {
    RETURN_IF_ERROR(file.mapping().CheckUnchanged());
  }
  return absl::OkStatus();
}

}  // namespace dlo
