// The transformer's source of weights: block after block, in the order they are computed.
//
//   for (int64_t i = 0; i < ring.num_blocks(); ++i) {
//     ASSIGN_OR_RETURN(BlockLease block, ring.Acquire());
//     hidden = Block(Views(block), hidden);
//   }
//
// A ring belongs to one thread. Acquire hands out blocks 0, 1, ..., num_blocks() - 1, 0, 1, ...;
// after a forward that ended early (an error, a cancellation) Rewind makes block 0 the next one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "absl/status/statusor.h"
#include "offload/block_layout.h"

namespace dlo {

// Told when a lease ends.
class LeaseOwner {
 public:
  virtual void Release() = 0;

 protected:
  ~LeaseOwner() = default;
};

// One block's weights, held while it computes. The bytes stay valid until the lease is destroyed;
// destruction does not wait for the computing. Move-only; belongs to the thread that acquired it.
class BlockLease {
 public:
  // `owner`, if any, outlives the lease.
  BlockLease(int64_t block, const BlockLayout* layout, std::byte* data, LeaseOwner* owner = nullptr)
      : block_(block), layout_(layout), data_(data), owner_(owner) {}
  BlockLease(BlockLease&& other) noexcept
      : block_(other.block_),
        layout_(other.layout_),
        data_(other.data_),
        owner_(std::exchange(other.owner_, nullptr)) {}
  BlockLease& operator=(BlockLease&&) = delete;
  ~BlockLease() {
    if (owner_ != nullptr) owner_->Release();
  }

  int64_t block() const { return block_; }
  const BlockLayout& layout() const { return *layout_; }
  std::byte* data() const { return data_; }  // on the device

 private:
  int64_t block_;
  const BlockLayout* layout_;
  std::byte* data_;
  LeaseOwner* owner_;
};

class BlockRing {
 public:
  virtual ~BlockRing() = default;
  virtual int64_t num_blocks() const = 0;
  virtual absl::StatusOr<BlockLease> Acquire() = 0;
  virtual void Rewind() = 0;
};

}  // namespace dlo
