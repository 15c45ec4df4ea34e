// Tokens that are matched in the text itself, before it is cut into pieces: </s>, <pad>,
// <extra_id_3>.
//
//   AddedTokenMatcher matcher({{.content = "</s>", .id = 1}});
//   matcher.Split("a</s>b");   // {"a", none}, {"</s>", 1}, {"b", none}
//
// Matching is that of the tokenizers library: leftmost, then longest, never overlapping.
//
// Immutable once made; safe from any thread. Nothing fails.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/strings/string_view.h"

namespace dlo {

struct AddedToken {
  std::string content;
  int64_t id = 0;
  bool single_word = false;  // only where no word character touches it
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // takes the white space after it
  bool normalized = false;   // looked for in the normalised text, not in the text as given
};

class AddedTokenMatcher {
 public:
  // Of equal contents the last one counts; empty contents are ignored.
  explicit AddedTokenMatcher(std::vector<AddedToken> tokens);

  // A stretch of the text: an added token, or what lies between two.
  struct Part {
    absl::string_view text;
    std::optional<int64_t> id;
  };

  // The whole of `text` in order, without empty parts. The parts point into `text`.
  std::vector<Part> Split(absl::string_view text) const;

 private:
  const AddedToken* MatchAt(absl::string_view text, size_t at) const;

  std::vector<AddedToken> tokens_;
  std::unordered_map<std::string_view, size_t> index_;  // content → place in tokens_
  std::vector<size_t> lengths_;                         // of contents, longest first
  bool begins_[256] = {};                               // bytes that begin a content
};

}  // namespace dlo
