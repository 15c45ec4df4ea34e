#include "models/text/t5_tokenizer.h"

#include <algorithm>
#include <utility>

#include "base/status_macros.h"
#include "models/text/unicode.h"

namespace dlo {
namespace {

std::string Apply(const Charsmap& map, const std::string& text) { return map.Normalize(text); }

std::string Apply(const StripStep& step, const std::string& text) {
  const std::u32string points = DecodeUtf8(text);
  size_t begin = 0;
  size_t end = points.size();
  while (step.left && begin < end && IsWhiteSpace(points[begin])) ++begin;
  while (step.right && end > begin && IsWhiteSpace(points[end - 1])) --end;
  return EncodeUtf8(std::u32string_view(points).substr(begin, end - begin));
}

std::string Apply(const ReplaceStep& step, const std::string& text) {
  std::string out;
  out.reserve(text.size());
  const size_t width = step.pattern.size();
  for (size_t pos = 0; pos < text.size();) {
    size_t end = pos;
    while (text.compare(end, width, step.pattern) == 0) {
      end += width;
      if (step.run_min == 0) break;
    }
    if (end == pos) {
      out.push_back(text[pos++]);
    } else if (step.run_min != 0 && (end - pos) / width < step.run_min) {
      out.append(text, pos, end - pos);
      pos = end;
    } else {
      out.append(step.content);
      pos = end;
    }
  }
  return out;
}

std::string Apply(NormalForm form, const std::string& text) {
  return EncodeUtf8(Normalize(DecodeUtf8(text), form));
}

// A stretch on its way to becoming words; `first` if it begins where the text begins.
struct Stretch {
  std::string text;
  bool first = false;
};

void Cut(const WhiteSpaceStep&, const Stretch& stretch, std::vector<Stretch>& out) {
  const absl::string_view text = stretch.text;
  size_t begin = 0;
  auto flush = [&](size_t end) {
    if (end > begin) {
      out.push_back({std::string(text.substr(begin, end - begin)), stretch.first && begin == 0});
    }
  };
  for (size_t pos = 0; pos < text.size();) {
    const size_t start = pos;
    if (IsWhiteSpace(NextCodePoint(text, pos))) {
      flush(start);
      begin = pos;
    }
  }
  flush(text.size());
}

void Cut(const MetaspaceStep& step, const Stretch& stretch, std::vector<Stretch>& out) {
  std::string text;
  text.reserve(stretch.text.size() + 16);
  for (char c : stretch.text) {
    if (c == ' ') {
      text.append(step.mark);
    } else {
      text.push_back(c);
    }
  }
  const bool prepend = step.prepend == MetaspaceStep::Prepend::kAlways ||
                       (step.prepend == MetaspaceStep::Prepend::kFirst && stretch.first);
  if (prepend && text.compare(0, step.mark.size(), step.mark) != 0) text.insert(0, step.mark);
  for (size_t begin = 0; begin < text.size();) {
    const size_t end =
        step.split ? std::min(text.find(step.mark, begin + 1), text.size()) : text.size();
    out.push_back({text.substr(begin, end - begin), stretch.first && begin == 0});
    begin = end;
  }
}

std::vector<AddedToken> WithNormalized(const std::vector<AddedToken>& tokens, bool normalized) {
  std::vector<AddedToken> chosen;
  std::copy_if(tokens.begin(), tokens.end(), std::back_inserter(chosen),
               [&](const AddedToken& token) { return token.normalized == normalized; });
  return chosen;
}

}  // namespace

absl::StatusOr<std::unique_ptr<T5Tokenizer>> T5Tokenizer::Load(
    const std::filesystem::path& tokenizer_dir) {
  ASSIGN_OR_RETURN(TokenizerSpec spec, ReadTokenizerSpec(tokenizer_dir));
  return std::make_unique<T5Tokenizer>(std::move(spec));
}

T5Tokenizer::T5Tokenizer(TokenizerSpec spec)
    : spec_(std::move(spec)),
      raw_tokens_(WithNormalized(spec_.added_tokens, false)),
      normalized_tokens_([this] {
        std::vector<AddedToken> tokens = WithNormalized(spec_.added_tokens, true);
        for (AddedToken& token : tokens) token.content = NormalizeText(token.content);
        return tokens;
      }()) {
  vocab_size_ = spec_.model.size();
  for (const AddedToken& token : spec_.added_tokens) {
    vocab_size_ = std::max(vocab_size_, token.id + 1);
  }
  for (const auto* ids : {&spec_.prefix_ids, &spec_.suffix_ids}) {
    for (int64_t id : *ids) vocab_size_ = std::max(vocab_size_, id + 1);
  }
}

std::string T5Tokenizer::NormalizeText(absl::string_view text) const {
  std::string normal(text);
  for (const NormalizerStep& step : spec_.normalizers) {
    normal = std::visit([&](const auto& s) { return Apply(s, normal); }, step);
  }
  return normal;
}

void T5Tokenizer::EncodeSegment(absl::string_view text, bool at_start, size_t limit,
                                std::vector<int64_t>& ids) const {
  std::vector<Stretch> stretches = {{std::string(text), at_start}};
  for (const PreTokenizerStep& step : spec_.pre_tokenizers) {
    std::vector<Stretch> cut;
    for (const Stretch& stretch : stretches) {
      std::visit([&](const auto& s) { Cut(s, stretch, cut); }, step);
    }
    stretches = std::move(cut);
  }
  for (const Stretch& stretch : stretches) {
    if (ids.size() >= limit) return;
    spec_.model.Encode(stretch.text, ids);
  }
}

std::vector<int64_t> T5Tokenizer::Encode(absl::string_view text, int max_length) const {
  const size_t fixed = spec_.prefix_ids.size() + spec_.suffix_ids.size();
  const size_t wanted = static_cast<size_t>(std::max(max_length, 0));
  const size_t limit = wanted > fixed ? wanted - fixed : 0;  // of pieces

  const std::string valid = EncodeUtf8(DecodeUtf8(text));
  std::vector<int64_t> pieces;
  bool at_start = true;
  auto add = [&](const AddedTokenMatcher::Part& part) {
    if (part.id) {
      pieces.push_back(*part.id);
    } else {
      EncodeSegment(part.text, at_start, limit, pieces);
    }
    at_start = false;
  };
  for (const auto& raw : raw_tokens_.Split(valid)) {
    if (pieces.size() >= limit) break;
    if (raw.id) {
      add(raw);
      continue;
    }
    const std::string normal = NormalizeText(raw.text);
    for (const auto& part : normalized_tokens_.Split(normal)) add(part);
  }
  pieces.resize(std::min(pieces.size(), limit));

  std::vector<int64_t> ids = spec_.prefix_ids;
  ids.insert(ids.end(), pieces.begin(), pieces.end());
  ids.insert(ids.end(), spec_.suffix_ids.begin(), spec_.suffix_ids.end());
  return ids;
}

}  // namespace dlo
