// Helpers for tests that compare tensors with golden ones.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "loader/safetensors.h"
#include "models/component_weights.h"
#include "tests/support/hash_weights.h"

namespace dlo {

// A tensor of the file as float32 (int64 stays), copied.
inline at::Tensor GoldenTensor(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsEntry& entry = file.tensors().at(name);
  const at::ScalarType dtype = entry.dtype == DType::kI64 ? at::kLong : TorchDType(entry.dtype);
  at::Tensor tensor = at::empty(entry.shape, dtype);
  std::memcpy(tensor.data_ptr(), file.data(entry).data(), static_cast<size_t>(entry.bytes));
  return dtype == at::kLong ? tensor : tensor.to(at::kFloat);
}

// "input.NAME" of the formula.
inline at::Tensor HashTensor(const std::string& name, at::IntArrayRef shape) {
  int64_t numel = 1;
  for (int64_t d : shape) numel *= d;
  std::vector<float> values = HashInput(name, numel);
  return at::tensor(values).view(shape);
}

inline double MaxAbsError(const at::Tensor& a, const at::Tensor& b) {
  EXPECT_EQ(a.sizes(), b.sizes());
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

// The largest error relative to the largest expected magnitude.
inline double RelativeError(const at::Tensor& actual, const at::Tensor& expected) {
  return MaxAbsError(actual, expected) / expected.to(at::kDouble).abs().max().item<double>();
}

// Compares a tensor with the summary that ../shared/reference/models.md section 9 states for it:
// values within `tolerance`, sum and L2 norm within `tolerance` relative to the norm.
inline void ExpectSummary(const at::Tensor& tensor, const HashSummary& expected, double tolerance) {
  const at::Tensor flat = tensor.to(at::kFloat).contiguous().flatten();
  const HashSummary actual =
      Summarize({flat.const_data_ptr<float>(), static_cast<size_t>(flat.numel())});
  const double scale = std::max(1.0, expected.l2);
  EXPECT_NEAR(actual.sum, expected.sum, 2 * tolerance * scale);
  EXPECT_NEAR(actual.l2, expected.l2, tolerance * scale);
  for (size_t i = 0; i < expected.values.size(); ++i) {
    EXPECT_NEAR(actual.values[i], expected.values[i], tolerance) << "value " << i;
  }
}

// A folder of this test, removed with it.
class ScratchDir {
 public:
  ScratchDir() {
    std::string name = (std::filesystem::temp_directory_path() / "dlo_test_XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~ScratchDir() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace dlo
