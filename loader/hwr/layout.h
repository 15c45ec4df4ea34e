// What an artifact holds and where: the final-layout host weights of all components of a model.
//
//   ArtifactLayout layout = {{.name = "transformer", .parts = {outside, block0, block1}}};
//   RETURN_IF_ERROR(CheckLayout(layout));
//   int64_t begin = PartOffset(layout[0], 2);   // of block 1 in transformer.bin
//
// A component is one payload file, NAME.bin. Its parts are what moves in one piece: part 0 the
// tensors outside the block ring, part b + 1 block b. Parts start at multiples of 4096 bytes, in
// order; what no tensor covers is zero. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/dtype.h"

namespace dlo::hwr {

inline constexpr int64_t kPartAlignment = 4096;

// What a part of `bytes` takes in its file.
constexpr int64_t PartExtent(int64_t bytes) {
  return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}

struct ArtifactTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;  // row-major, contiguous
  int64_t offset = 0;          // in its part
  int64_t bytes = 0;

  bool operator==(const ArtifactTensor&) const = default;
};

struct ArtifactPart {
  std::vector<ArtifactTensor> tensors;  // ascending offsets, no overlap
  int64_t bytes = 0;                    // at least to the end of the last tensor; may be 0

  bool operator==(const ArtifactPart&) const = default;
};

struct ArtifactComponent {
  std::string name;  // of letters, digits, "_" and "-"
  std::vector<ArtifactPart> parts;

  bool operator==(const ArtifactComponent&) const = default;
};

using ArtifactLayout = std::vector<ArtifactComponent>;

// INVALID_ARGUMENT, naming the offender, for: no component, a name that is no plain file name or
// comes twice, a tensor's name twice in a component, bytes that do not fit shape and dtype,
// overlap, descending offsets, a tensor beyond its part, or sizes beyond 2^60.
absl::Status CheckLayout(const ArtifactLayout& layout);

// Of a checked layout.
int64_t PartOffset(const ArtifactComponent& component, int part);
int64_t PayloadBytes(const ArtifactComponent& component);  // of its file; a multiple of 4096
int64_t PayloadBytes(const ArtifactLayout& layout);
std::string PayloadName(const ArtifactComponent& component);  // "transformer.bin"

// SHA-256 in hex over names, dtypes, shapes, offsets and sizes.
std::string LayoutDigest(const ArtifactLayout& layout);

}  // namespace dlo::hwr
