// A model in host memory whose every word says where it belongs, for tests of streaming.
//
//   const HostModel model({{40, 700, 3}, {9}});   // two rings; words in each block's first tensor
//   auto streamer = BlockStreamer::Create(device, model.Whole(), options, nullptr);
//   ... EXPECT_TRUE(HostModel::Matches(lease, ring));
//
// The host blocks point into the model.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "offload/block_streamer.h"

namespace dlo {

class HostModel {
 public:
  explicit HostModel(const std::vector<std::vector<int64_t>>& words) {
    for (size_t r = 0; r < words.size(); ++r) {
      layouts_.emplace_back();
      bytes_.emplace_back();
      for (size_t b = 0; b < words[r].size(); ++b) {
        // Two tensors, so that layouts have a gap.
        layouts_[r].push_back(
            BlockLayout::Of({{.name = "a", .shape = {words[r][b]}, .dtype = DType::kF32},
                             {.name = "b", .shape = {3}, .dtype = DType::kF32}}));
        std::vector<uint32_t> data(layouts_[r].back().total_bytes() / 4);
        for (size_t i = 0; i < data.size(); ++i) {
          data[i] = Word(static_cast<int>(r), static_cast<int64_t>(b), static_cast<int64_t>(i));
        }
        bytes_[r].push_back(std::move(data));
      }
    }
  }

  // For rank-local transfer from memory that devices can copy from.
  std::vector<std::vector<HostBlock>> Whole() const {
    return Rings([](const BlockLayout& layout, const std::byte* data) {
      return HostBlock{.layout = layout, .bytes = data};
    });
  }

  // For rank-local transfer of tensors at their own addresses, as a checkpoint has them.
  std::vector<std::vector<HostBlock>> Staged() const {
    return Rings([](const BlockLayout& layout, const std::byte* data) {
      HostBlock block{.layout = layout};
      for (const auto& t : layout.tensors()) {
        block.pieces.push_back({data + t.offset, t.offset, t.spec.bytes()});
      }
      return block;
    });
  }

  // One rank's shards, padded with zeros behind the block's end. The rings point into `bytes`.
  struct Shards {
    std::vector<std::vector<HostBlock>> rings;
    std::vector<std::vector<std::byte>> bytes;
  };
  Shards Shard(int rank, int size) const {
    Shards shards{.rings = Whole(), .bytes = {}};
    for (auto& ring : shards.rings) {
      for (HostBlock& block : ring) {
        const int64_t shard = block.layout.shard_bytes(size), begin = shard * rank;
        shards.bytes.emplace_back(shard);
        const int64_t own = std::min(shard, block.layout.total_bytes() - begin);
        if (own > 0) std::memcpy(shards.bytes.back().data(), block.bytes + begin, own);
        block.bytes = shards.bytes.back().data();
      }
    }
    return shards;
  }

  // An empty plan over the rings.
  VisitPlan Plan() const {
    std::vector<int64_t> sizes;
    for (const auto& ring : layouts_) sizes.push_back(static_cast<int64_t>(ring.size()));
    return VisitPlan(sizes);
  }

  const std::vector<std::vector<BlockLayout>>& layouts() const { return layouts_; }

  // Whether the leased bytes are the block's.
  static bool Matches(const BlockLease& lease, int ring) {
    for (const auto& t : lease.layout().tensors()) {
      for (int64_t i = 0; i < t.spec.num_elements(); ++i) {
        uint32_t word;
        std::memcpy(&word, lease.data() + t.offset + 4 * i, 4);
        if (word != Word(ring, lease.block(), t.offset / 4 + i)) return false;
      }
    }
    return true;
  }

 private:
  // Belongs to one place of one block.
  static uint32_t Word(int ring, int64_t block, int64_t i) {
    return static_cast<uint32_t>(ring * 1000003 + block * 10007 + i * 31 + 7);
  }

  template <typename F>
  std::vector<std::vector<HostBlock>> Rings(F f) const {
    std::vector<std::vector<HostBlock>> rings(layouts_.size());
    for (size_t r = 0; r < layouts_.size(); ++r) {
      for (size_t b = 0; b < layouts_[r].size(); ++b) {
        rings[r].push_back(
            f(layouts_[r][b], reinterpret_cast<const std::byte*>(bytes_[r][b].data())));
      }
    }
    return rings;
  }

  std::vector<std::vector<BlockLayout>> layouts_;
  std::vector<std::vector<std::vector<uint32_t>>> bytes_;
};

}  // namespace dlo
