// The tokenizer of T5 and UMT5: text to token ids, from the files of a diffusers repository's
// `tokenizer/` folder.
//
//   ASSIGN_OR_RETURN(auto tokenizer, T5Tokenizer::Load(model_dir / "tokenizer"));
//   std::vector<int64_t> ids = tokenizer->Encode(CleanPrompt(prompt), 512);   // ..., </s>
//
// Ids equal those of the tokenizers library on the same tokenizer.json: added tokens (</s>,
// <extra_id_3>) first, then normalisation, words, and the unigram model. A folder without
// tokenizer.json is read from spiece.model, as transformers converts it.
//
// libsentencepiece is not used: Debian's carries an older protobuf whose symbols clash with the one
// that gRPC loads, so a program that links both dies at start; and it cannot give the same ids for
// <0x41>, </s> in full-width letters and the like.
//
// Immutable after Load; Encode is safe from any thread at once. Errors of Load: tokenizer_spec.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "models/text/tokenizer_spec.h"

namespace dlo {

class T5Tokenizer {
 public:
  static absl::StatusOr<std::unique_ptr<T5Tokenizer>> Load(
      const std::filesystem::path& tokenizer_dir);

  explicit T5Tokenizer(TokenizerSpec spec);
  T5Tokenizer(const T5Tokenizer&) = delete;
  T5Tokenizer& operator=(const T5Tokenizer&) = delete;

  // At most max_length ids without padding, the last </s>; pieces that do not fit are left out.
  // Only
  // </s> for an empty text, and for a max_length below 1 too. Bytes that are not UTF-8 count as
  // U+FFFD. Nothing fails.
  std::vector<int64_t> Encode(absl::string_view text, int max_length) const;

  // One more than the largest id that Encode can return: the rows that an embedding table needs.
  int64_t vocab_size() const { return vocab_size_; }

  int64_t eos_id() const { return spec_.suffix_ids.back(); }

 private:
  std::string NormalizeText(absl::string_view text) const;
  void EncodeSegment(absl::string_view text, bool at_start, size_t limit,
                     std::vector<int64_t>& ids) const;

  TokenizerSpec spec_;
  AddedTokenMatcher raw_tokens_;         // matched in the text as given
  AddedTokenMatcher normalized_tokens_;  // matched after normalisation
  int64_t vocab_size_ = 0;
};

}  // namespace dlo
