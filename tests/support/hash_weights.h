// Weights and inputs made from a formula, so a tiny checkpoint and its expected outputs need no
// files, no Python and no network.
//
//   std::vector<float> weight = HashWeight("decoder.conv_in.weight", {12, 16, 3, 3, 3});
//   std::vector<float> latents = HashInput("input.latents", 1 * 16 * 3 * 2 * 2);
//
// Element i (row-major) of a tensor depends only on its name and i: a CRC-32 of the name seeds an
// integer mix, whose 32 bits become a number in [-1, 1), scaled and shifted by a rule on the name.
// Torch-free; pure functions, safe from any thread. The formula and the expected model outputs:
// ../shared/reference/models.md, section 9.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace dlo {

// zlib's CRC-32 of `bytes`.
inline uint32_t HashCrc32(absl::string_view bytes) {
  uint32_t crc = 0xFFFFFFFFu;
  for (unsigned char byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0xEDB88320u : 0u);
  }
  return ~crc;
}

// The number in [-1, 1) at `index` of a tensor whose name has checksum `crc`. Indices wrap at 2^32,
// as in the formula.
inline double HashUniform(uint32_t crc, uint32_t index) {
  uint32_t h = index * 0x9E3779B1u + crc;
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  h ^= h >> 16;
  return h / 4294967296.0 * 2.0 - 1.0;
}

// out[i] = offset + scale * u(name, i), computed in float64 and rounded once.
inline void HashFill(absl::string_view name, double scale, double offset, absl::Span<float> out) {
  const uint32_t crc = HashCrc32(name);
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<float>(offset + scale * HashUniform(crc, static_cast<uint32_t>(i)));
  }
}

struct HashRange {
  double scale = 1;
  double offset = 0;
};

// The range of a weight, by its bare parameter name (without a component prefix) and shape.
inline HashRange HashWeightRange(absl::string_view name, absl::Span<const int64_t> shape) {
  const absl::string_view last = name.substr(name.rfind('.') + 1);
  if (last == "scale_shift_table") return {0.2, 0};
  if (last == "bias") return {0.1, 0};
  if (last == "gamma") return {0.1, 1};
  if (name == "shared.weight") return {1, 0};
  if (absl::EndsWith(name, "relative_attention_bias.weight")) return {1, 0};
  if (shape.size() == 1) return {0.1, 1};
  double fan_in = 1;
  for (size_t i = 1; i < shape.size(); ++i) fan_in *= static_cast<double>(shape[i]);
  return {1 / std::sqrt(fan_in), 0};
}

// A whole weight. `component` ("vae", "text_encoder", ...) prefixes the hashed name as "vae:NAME"
// where a pipeline's components must differ; empty hashes the bare name.
inline std::vector<float> HashWeight(absl::string_view name, absl::Span<const int64_t> shape,
                                     absl::string_view component = "") {
  int64_t numel = 1;
  for (int64_t d : shape) numel *= d;
  std::vector<float> out(static_cast<size_t>(numel));
  const HashRange range = HashWeightRange(name, shape);
  const std::string hashed =
      component.empty() ? std::string(name) : absl::StrCat(component, ":", name);
  HashFill(hashed, range.scale, range.offset, absl::MakeSpan(out));
  return out;
}

// A whole input such as "input.latents": uniform in [-1, 1).
inline std::vector<float> HashInput(absl::string_view name, int64_t numel) {
  std::vector<float> out(static_cast<size_t>(numel));
  HashFill(name, 1, 0, absl::MakeSpan(out));
  return out;
}

// How section 9 states an output: its sum and L2 norm (float64) and eight of its elements.
struct HashSummary {
  double sum = 0;
  double l2 = 0;
  std::array<float, 8> values = {};  // at 0, 1, 2, 3, k/3, k/2, 2k/3, k-1
};

inline HashSummary Summarize(absl::Span<const float> output) {
  HashSummary summary;
  for (float v : output) {
    summary.sum += v;
    summary.l2 += static_cast<double>(v) * v;
  }
  summary.l2 = std::sqrt(summary.l2);
  const size_t k = output.size();
  const std::array<size_t, 8> at = {0, 1, 2, 3, k / 3, k / 2, 2 * k / 3, k - 1};
  for (size_t i = 0; i < at.size() && k > 3; ++i) summary.values[i] = output[at[i]];
  return summary;
}

}  // namespace dlo
