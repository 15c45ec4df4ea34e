// The unigram language model of SentencePiece: cuts a word into the pieces of a vocabulary with the
// best total score.
//
//   ASSIGN_OR_RETURN(UnigramModel model, UnigramModel::Create(pieces, unk_id, byte_fallback));
//   std::vector<int64_t> ids;
//   model.Encode("▁green", ids);   // appends
//
// Ids and ties are those of the tokenizers library (Unigram, "optimized" search) on a
// tokenizer.json: every piece of the vocabulary can match, also <0x41> and </s>; neighbouring
// unknown characters become one unknown piece; with byte fallback an unknown piece becomes one
// piece for each of its bytes if the vocabulary has them all.
//
// Immutable after Create; safe from any thread.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dlo {

class UnigramModel {
 public:
  struct Piece {
    std::string text;
    double score = 0;  // log probability
  };

  // The id of a piece is its index. Where a text stands twice, the last one counts.
  // INVALID_ARGUMENT, naming the piece, for an empty vocabulary, an empty piece, a score that is
  // not finite, or unk_id outside the vocabulary.
  static absl::StatusOr<UnigramModel> Create(std::vector<Piece> pieces, int64_t unk_id,
                                             bool byte_fallback);

  // Appends the ids of `word`, a normalised word with its word-start mark. Time: length × longest
  // match.
  void Encode(absl::string_view word, std::vector<int64_t>& ids) const;

  // The id of the piece with exactly this text.
  std::optional<int64_t> Find(absl::string_view text) const;

  int64_t size() const { return static_cast<int64_t>(pieces_.size()); }

 private:
  UnigramModel() = default;

  std::vector<Piece> pieces_;          // by id
  std::vector<uint32_t> sorted_;       // ids in the order of their texts' bytes, each text once
  std::array<uint32_t, 257> first_;    // sorted_[first_[b], first_[b + 1]) begin with byte b
  std::array<int64_t, 256> byte_ids_;  // ids of <0x00> to <0xFF>, or -1
  bool byte_fallback_ = false;
  int64_t unk_id_ = 0;
  double unk_score_ = 0;
};

}  // namespace dlo
