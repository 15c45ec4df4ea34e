#include "models/mapped_blocks.h"

#include <spdlog/spdlog.h>

#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "loader/weights.h"

namespace dlo {
namespace {

bool CastOnce(const WeightBinding& binding) {
  return binding.adaptation && binding.adaptation->runs.empty();
}

// Appends the pieces of a tensor whose bytes lie in the checkpoint.
absl::Status AppendMapped(const Checkpoint& checkpoint, const WeightBinding& binding,
                          const BlockLayout::Tensor& tensor, std::vector<PackPiece>* pieces) {
  const std::optional<TensorSource> source = checkpoint.Find(binding.key);
  const int64_t source_bytes = source ? static_cast<int64_t>(source->data.size()) : -1;
  if (source_bytes != binding.bytes || source->file != binding.file) {
    return absl::InternalError(absl::StrCat("the plan of ", checkpoint.dir().native(), " binds ",
                                            binding.name, " to what is not there"));
  }
  const std::vector<ByteRun> whole = {{0, 0, source_bytes}};
  for (const ByteRun& run : binding.adaptation ? binding.adaptation->runs : whole) {
    if (run.bytes == 0) continue;
    pieces->push_back({.source = source->data.data() + run.source,
                       .offset = tensor.offset + run.destination,
                       .bytes = run.bytes,
                       .file = source->mapping,
                       .tensor = source->name});
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<MappedBlocks> MappedBlocks::Create(std::shared_ptr<const Checkpoint> checkpoint,
                                                  const ComponentPlan& plan,
                                                  std::vector<BlockLayout> layouts) {
  std::map<absl::string_view, const WeightBinding*> bindings;
  for (const WeightBinding& binding : plan.bindings) {
    bindings[binding.name] = &binding;
  }
  MappedBlocks blocks;
  std::vector<TensorSpec> cast_specs;
  std::vector<int64_t> cast_offsets;
  int64_t cast_bytes = 0;
  for (const BlockLayout& layout : layouts) {
    for (const BlockLayout::Tensor& tensor : layout.tensors()) {
      const auto it = bindings.find(tensor.spec.name);
      if (it == bindings.end()) {
        return absl::InternalError(absl::StrCat("the plan of ", checkpoint->dir().native(),
                                                " does not bind ", tensor.spec.name));
      }
      if (!CastOnce(*it->second)) continue;
      cast_specs.push_back(tensor.spec);
      cast_offsets.push_back(cast_bytes);
      cast_bytes += (tensor.spec.bytes() + 15) / 16 * 16;
    }
  }
  blocks.cast_.resize(static_cast<size_t>(cast_bytes));
  std::vector<std::byte*> destinations;
  for (int64_t offset : cast_offsets) destinations.push_back(blocks.cast_.data() + offset);
  if (!cast_specs.empty()) {
    // The plan has judged the checkpoint's other tensors.
    RETURN_IF_ERROR(LoadTensors(*checkpoint, cast_specs, destinations, {.partial = true}));
  }

  size_t next_cast = 0;
  for (const BlockLayout& layout : layouts) {
    std::vector<PackPiece>& pieces = blocks.pieces_.emplace_back();
    for (const BlockLayout::Tensor& tensor : layout.tensors()) {
      const WeightBinding& binding = *bindings[tensor.spec.name];
      if (CastOnce(binding)) {
        pieces.push_back({.source = destinations[next_cast++],
                          .offset = tensor.offset,
                          .bytes = tensor.spec.bytes()});
      } else {
        RETURN_IF_ERROR(AppendMapped(*checkpoint, binding, tensor, &pieces));
      }
    }
  }
  blocks.name_ = plan.name;
  blocks.layouts_ = std::move(layouts);
  blocks.checkpoint_ = std::move(checkpoint);
  return blocks;
}

absl::StatusOr<FaultInStats> MappedBlocks::FaultIn(int threads) const {
  std::vector<PackPiece> all;
  for (const auto& pieces : pieces_) all.insert(all.end(), pieces.begin(), pieces.end());
  ASSIGN_OR_RETURN(const FaultInStats stats, dlo::FaultIn(all, threads));
  spdlog::info(
      "{}: {:.1f} MB of pages faulted in within {:.2f} s by {} threads, {:.1f} MB of them from "
      "disk",
      name_, static_cast<double>(stats.bytes) / 1e6, absl::ToDoubleSeconds(stats.time),
      stats.threads, static_cast<double>(stats.disk_bytes) / 1e6);
  return stats;
}

}  // namespace dlo
