#include "models/text/unigram.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "models/text/unicode.h"

namespace dlo {
namespace {

// What an unknown character costs beyond the worst piece; the constant of SentencePiece's unigram
// model.
constexpr double kUnknownPenalty = 10;

// The first 8 bytes as a number that compares as they do.
uint64_t SortKey(std::string_view text) {
  uint64_t key = 0;
  for (size_t i = 0; i < 8; ++i) {
    key = (key << 8) | (i < text.size() ? static_cast<unsigned char>(text[i]) : 0U);
  }
  return key;
}

}  // namespace

absl::StatusOr<UnigramModel> UnigramModel::Create(std::vector<Piece> pieces, int64_t unk_id,
                                                  bool byte_fallback) {
  if (pieces.empty() || pieces.size() > UINT32_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat("the vocabulary has ", pieces.size(), " pieces"));
  }
  if (unk_id < 0 || unk_id >= static_cast<int64_t>(pieces.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("unk_id is ", unk_id, ", but the vocabulary has ", pieces.size(), " pieces"));
  }
  UnigramModel model;
  double min_score = pieces[0].score;
  std::vector<std::pair<uint64_t, uint32_t>> order;
  order.reserve(pieces.size());
  for (uint32_t id = 0; id < pieces.size(); ++id) {
    const Piece& piece = pieces[id];
    if (piece.text.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("piece ", id, " of the vocabulary is empty"));
    }
    if (!std::isfinite(piece.score)) {
      return absl::InvalidArgumentError(
          absl::StrCat("piece ", id, " of the vocabulary has the score ", piece.score));
    }
    min_score = std::min(min_score, piece.score);
    order.emplace_back(SortKey(piece.text), id);
  }
  std::sort(order.begin(), order.end(), [&](const auto& a, const auto& b) {
    if (a.first != b.first) return a.first < b.first;
    const int compared = pieces[a.second].text.compare(pieces[b.second].text);
    return compared != 0 ? compared < 0 : a.second < b.second;
  });
  model.sorted_.reserve(order.size());
  for (const auto& [key, id] : order) {
    if (!model.sorted_.empty() && pieces[model.sorted_.back()].text == pieces[id].text) {
      model.sorted_.back() = id;
    } else {
      model.sorted_.push_back(id);
    }
  }
  model.first_.fill(0);
  for (uint32_t id : model.sorted_) {
    ++model.first_[static_cast<unsigned char>(pieces[id].text[0]) + 1U];
  }
  std::partial_sum(model.first_.begin(), model.first_.end(), model.first_.begin());
  model.pieces_ = std::move(pieces);
  model.unk_id_ = unk_id;
  model.unk_score_ = min_score - kUnknownPenalty;
  model.byte_fallback_ = byte_fallback;
  for (size_t byte = 0; byte < 256; ++byte) {
    model.byte_ids_[byte] = model.Find(absl::StrFormat("<0x%02X>", byte)).value_or(-1);
  }
  return model;
}

std::optional<int64_t> UnigramModel::Find(absl::string_view text) const {
  const std::string_view wanted(text.data(), text.size());
  const auto found =
      std::lower_bound(sorted_.begin(), sorted_.end(), wanted,
                       [&](uint32_t id, std::string_view t) { return pieces_[id].text < t; });
  if (found == sorted_.end() || pieces_[*found].text != wanted) return std::nullopt;
  return *found;
}

void UnigramModel::Encode(absl::string_view word, std::vector<int64_t>& ids) const {
  struct Node {
    double score = 0;    // of the best way to here
    int64_t start = -1;  // where its last piece begins; -1: not reached
    int64_t id = 0;      // that piece
  };
  std::vector<Node> best(word.size() + 1);
  auto offer = [&](size_t end, size_t start, int64_t id, double score) {
    Node& node = best[end];
    if (node.start < 0 || score > node.score) {
      node = {score, static_cast<int64_t>(start), id};
    }
  };

  for (size_t start = 0; start < word.size();) {
    size_t next = start;
    NextCodePoint(word, next);
    bool character_known = false;
    // Narrows the sorted vocabulary to the pieces that share one more byte with the word.
    const auto byte = static_cast<unsigned char>(word[start]);
    auto low = sorted_.begin() + first_[byte];
    auto high = sorted_.begin() + first_[byte + 1U];
    for (size_t length = 1; low != high; ++length) {
      if (const Piece& piece = pieces_[*low]; piece.text.size() == length) {
        offer(start + length, start, *low, best[start].score + piece.score);
        character_known = character_known || start + length == next;
        ++low;
      }
      if (start + length == word.size()) break;
      const auto wanted = static_cast<unsigned char>(word[start + length]);
      auto at = [&](uint32_t id) { return static_cast<unsigned char>(pieces_[id].text[length]); };
      low = std::partition_point(low, high, [&](uint32_t id) { return at(id) < wanted; });
      high = std::partition_point(low, high, [&](uint32_t id) { return at(id) == wanted; });
    }
    if (!character_known) offer(next, start, unk_id_, best[start].score + unk_score_);
    start = next;
  }

  struct Span {
    size_t start, end;
    int64_t id;
  };
  std::vector<Span> spans;  // from the end of the word to its beginning
  for (size_t end = word.size(); end > 0;) {
    const Node& node = best[end];
    const auto start = static_cast<size_t>(node.start);
    if (node.id == unk_id_ && !spans.empty() && spans.back().id == unk_id_) {
      spans.back().start = start;
    } else {
      spans.push_back({start, end, node.id});
    }
    end = start;
  }
  for (auto span = spans.rbegin(); span != spans.rend(); ++span) {
    const absl::string_view text = word.substr(span->start, span->end - span->start);
    const auto bytes_known = [&] {
      return std::all_of(text.begin(), text.end(),
                         [&](char c) { return byte_ids_[static_cast<unsigned char>(c)] >= 0; });
    };
    if (span->id == unk_id_ && byte_fallback_ &&
        text != pieces_[static_cast<size_t>(unk_id_)].text && bytes_known()) {
      for (char c : text) ids.push_back(byte_ids_[static_cast<unsigned char>(c)]);
    } else {
      ids.push_back(span->id);
    }
  }
}

}  // namespace dlo
