// Writes a component's checkpoint filled by the formula of hash_weights.h, float32, for tests.
//
//   ASSERT_TRUE(WriteHashCheckpoint(dir, WanTransformerSpecs(config, DType::kF32)).ok());
//   auto checkpoint = Checkpoint::Open(dir);
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/tensor_spec.h"
#include "loader/safetensors.h"
#include "tests/support/hash_weights.h"

namespace dlo {

// Creates `dir` and in it diffusion_pytorch_model.safetensors. `component` as in HashWeight.
inline absl::Status WriteHashCheckpoint(const std::filesystem::path& dir,
                                        absl::Span<const TensorSpec> specs,
                                        absl::string_view component = "") {
  std::filesystem::create_directories(dir);
  std::vector<std::vector<float>> values;
  std::vector<SafetensorsTensor> tensors;
  for (const TensorSpec& spec : specs) {
    values.push_back(HashWeight(spec.name, spec.shape, component));
    tensors.push_back({.name = spec.name,
                       .dtype = DType::kF32,
                       .shape = spec.shape,
                       .data = {reinterpret_cast<const std::byte*>(values.back().data()),
                                values.back().size() * sizeof(float)}});
  }
  return WriteSafetensors(dir / "diffusion_pytorch_model.safetensors", tensors);
}

}  // namespace dlo
