// The compiled normalisation rules of SentencePiece (`precompiled_charsmap`): strings and what
// replaces them.
//
//   ASSIGN_OR_RETURN(Charsmap map, Charsmap::Parse(std::move(blob)));
//   std::string normal = map.Normalize("\xEF\xBC\xA1");   // "A", with the rules nmt_nfkc
//
// The blob is a little-endian uint32 (bytes of the trie), the trie (a Darts-clone double array of
// uint32 units) and the replacements, each ended by a zero byte. It comes from a file and is
// trusted in nothing: every index is checked where it is used.
//
// Immutable after Parse; safe from any thread. Parse fails with INVALID_ARGUMENT for a blob whose
// parts do not fit it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dlo {

class Charsmap {
 public:
  static absl::StatusOr<Charsmap> Parse(absl::string_view blob);

  // Normalises as the tokenizers library does: a grapheme cluster of at most 5 bytes whose
  // beginning has a rule is replaced whole by that rule; otherwise each code point is looked up
  // alone. (SentencePiece itself takes the longest rule at each position. The two differ in rare
  // cases, such as U+1E9B U+0323.)
  std::string Normalize(absl::string_view text) const;

 private:
  // The replacement under the shortest key that begins `text`; nullopt if none does.
  std::optional<std::string_view> Lookup(absl::string_view text) const;

  std::vector<uint32_t> units_;
  std::string replacements_;
};

}  // namespace dlo
