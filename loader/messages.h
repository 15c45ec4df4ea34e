// Pieces of error messages about checkpoints. Internal to loader/. Stateless functions; an
// Offenders belongs to one thread.
//
//   Offenders missing;
//   missing.Add(QuoteForMessage("a.weight"));
//   if (!missing.empty()) Report(missing.Text());  // 1 in all: "a.weight"
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace dlo {

// `text` in double quotes: control and invalid bytes escaped, at most a line long.
std::string QuoteForMessage(absl::string_view text);

// "[2, 3]"
std::string ShapeText(absl::Span<const int64_t> shape);

// Counts what is wrong and keeps the first few.
class Offenders {
 public:
  void Add(std::string what);
  bool empty() const { return count_ == 0; }
  std::string Text() const;

 private:
  size_t count_ = 0;
  std::vector<std::string> shown_;
};

}  // namespace dlo
