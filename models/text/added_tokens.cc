#include "models/text/added_tokens.h"

#include <algorithm>
#include <utility>

#include "models/text/unicode.h"

namespace dlo {
namespace {

// The last code point of `text`, or a blank for none.
char32_t LastCodePoint(absl::string_view text) {
  if (text.empty()) return U' ';
  size_t pos = text.size() - 1;
  for (int i = 0; i < 3 && pos > 0 && (static_cast<unsigned char>(text[pos]) & 0xC0) == 0x80; ++i) {
    --pos;
  }
  return NextCodePoint(text, pos);
}

char32_t FirstCodePoint(absl::string_view text) {
  size_t pos = 0;
  return text.empty() ? U' ' : NextCodePoint(text, pos);
}

size_t LeadingSpaceBytes(absl::string_view text) {
  size_t end = 0;
  for (size_t pos = 0; pos < text.size() && IsWhiteSpace(NextCodePoint(text, pos));) end = pos;
  return end;
}

size_t TrailingSpaceBytes(absl::string_view text) {
  size_t begin = text.size();
  while (begin > 0) {
    const char32_t last = LastCodePoint(text.substr(0, begin));
    if (!IsWhiteSpace(last)) break;
    begin -= last < 0x80 ? 1U : last < 0x800 ? 2U : 3U;
  }
  return text.size() - begin;
}

}  // namespace

AddedTokenMatcher::AddedTokenMatcher(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const std::string& content = tokens_[i].content;
    if (content.empty()) continue;
    index_[content] = i;
    lengths_.push_back(content.size());
    begins_[static_cast<unsigned char>(content[0])] = true;
  }
  std::sort(lengths_.begin(), lengths_.end(), std::greater<>());
  lengths_.erase(std::unique(lengths_.begin(), lengths_.end()), lengths_.end());
}

const AddedToken* AddedTokenMatcher::MatchAt(absl::string_view text, size_t at) const {
  if (!begins_[static_cast<unsigned char>(text[at])]) return nullptr;
  for (size_t length : lengths_) {
    if (length > text.size() - at) continue;
    const auto found = index_.find(std::string_view(text.data() + at, length));
    if (found != index_.end()) return &tokens_[found->second];
  }
  return nullptr;
}

std::vector<AddedTokenMatcher::Part> AddedTokenMatcher::Split(absl::string_view text) const {
  std::vector<Part> parts;
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    const AddedToken* token = MatchAt(text, at);
    if (token == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at;
    size_t end = at + token->content.size();
    at = end;
    if (token->single_word && (IsWordCharacter(LastCodePoint(text.substr(0, begin))) ||
                               IsWordCharacter(FirstCodePoint(text.substr(end))))) {
      continue;
    }
    if (token->lstrip) {
      begin = std::max(done, begin - TrailingSpaceBytes(text.substr(0, begin)));
    }
    if (token->rstrip) end += LeadingSpaceBytes(text.substr(end));
    if (begin > done) parts.push_back({text.substr(done, begin - done), std::nullopt});
    parts.push_back({text.substr(begin, end - begin), token->id});
    done = end;
    at = std::max(at, end);
  }
  if (done < text.size()) parts.push_back({text.substr(done), std::nullopt});
  return parts;
}

}  // namespace dlo
