#include "models/text/html_entities.h"

#include <algorithm>
#include <cstdint>
#include <optional>

#include "models/text/unicode.h"

namespace dlo {
namespace {

constexpr uint8_t kBare = 1;   // also read without the semicolon
constexpr uint8_t kUpper = 2;  // the all-capitals spelling is read by UnescapeClosedEntities

struct HtmlEntity {
  std::string_view name;
  char32_t value[3];  // padded with 0
  uint8_t flags;
};

#include "models/text/html_entities.inc"

const HtmlEntity* Find(const HtmlEntity* begin, const HtmlEntity* end, std::string_view name) {
  const HtmlEntity* found = std::lower_bound(
      begin, end, name, [](const HtmlEntity& e, std::string_view n) { return e.name < n; });
  return found != end && found->name == name ? found : nullptr;
}

const HtmlEntity* FindEntity(std::string_view name) {
  return Find(std::begin(kEntities), std::end(kEntities), name);
}

void Append(const HtmlEntity& entity, std::u32string& out) {
  for (char32_t c : entity.value) {
    if (c != 0) out.push_back(c);
  }
}

bool IsDigit(char32_t c) { return c >= '0' && c <= '9'; }
bool IsLetter(char32_t c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

int DigitValue(char32_t c, int base) {
  if (IsDigit(c)) return static_cast<int>(c - '0');
  if (base == 16 && c >= 'a' && c <= 'f') return static_cast<int>(c - 'a') + 10;
  if (base == 16 && c >= 'A' && c <= 'F') return static_cast<int>(c - 'A') + 10;
  return -1;
}

// Code points that a numeric reference may not name; it then stands for nothing.
bool IsForbidden(char32_t c) {
  return (c >= 0x01 && c <= 0x08) || c == 0x0B || (c >= 0x0E && c <= 0x1F) || c == 0x7F ||
         (c >= 0xFDD0 && c <= 0xFDEF) || (c & 0xFFFE) == 0xFFFE;
}

struct NumericReference {
  size_t end;                     // after the digits and the semicolon, if there is one
  bool closed;                    // has the semicolon
  std::optional<char32_t> value;  // none: stands for nothing
};

// The numeric reference that starts at text[at] == '&'; nullopt if none does.
std::optional<NumericReference> ParseNumeric(std::u32string_view text, size_t at) {
  size_t pos = at + 1;
  if (pos >= text.size() || text[pos] != '#') return std::nullopt;
  ++pos;
  int base = 10;
  if (pos < text.size() && (text[pos] == 'x' || text[pos] == 'X')) {
    base = 16;
    ++pos;
  }
  const size_t first = pos;
  char32_t number = 0;
  for (; pos < text.size(); ++pos) {
    int digit = DigitValue(text[pos], base);
    if (digit < 0) break;
    // Saturates above the last code point, so any number of digits is fine.
    number = std::min<char32_t>(number * static_cast<char32_t>(base) + static_cast<char32_t>(digit),
                                0x110000);
  }
  if (pos == first) return std::nullopt;
  NumericReference reference{pos, pos < text.size() && text[pos] == ';', number};
  if (reference.closed) ++reference.end;
  if (number == 0 || (number >= 0xD800 && number <= 0xDFFF) || number > 0x10FFFF) {
    reference.value = kReplacementCharacter;
  } else if (number >= 0x80 && number <= 0x9F) {
    reference.value = Windows1252(number);
  } else if (IsForbidden(number)) {
    reference.value = std::nullopt;
  }
  return reference;
}

}  // namespace

char32_t Windows1252(char32_t c1) {
  constexpr char32_t kTable[32] = {0x20AC, 0x81,   0x201A, 0x0192, 0x201E, 0x2026, 0x2020, 0x2021,
                                   0x02C6, 0x2030, 0x0160, 0x2039, 0x0152, 0x8D,   0x017D, 0x8F,
                                   0x90,   0x2018, 0x2019, 0x201C, 0x201D, 0x2022, 0x2013, 0x2014,
                                   0x02DC, 0x2122, 0x0161, 0x203A, 0x0153, 0x9D,   0x017E, 0x0178};
  return c1 >= 0x80 && c1 <= 0x9F ? kTable[c1 - 0x80] : c1;
}

std::u32string UnescapeHtml(std::u32string_view text) {
  constexpr size_t kMaxName = 32;  // of a name that html.unescape looks at
  constexpr std::u32string_view kEndsName = U"\t\n\f <&#;";
  std::u32string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    if (text[pos] != '&') {
      out.push_back(text[pos++]);
      continue;
    }
    if (auto number = ParseNumeric(text, pos)) {
      if (number->value) out.push_back(*number->value);
      pos = number->end;
      continue;
    }
    // Names are ASCII; another character ends what can match, not what the reference spans.
    std::string name;
    size_t end = pos + 1;
    bool ascii = true;
    for (; end < text.size() && end - pos <= kMaxName &&
           kEndsName.find(text[end]) == std::u32string_view::npos;
         ++end) {
      ascii = ascii && text[end] < 0x80;
      if (ascii) name.push_back(static_cast<char>(text[end]));
    }
    const bool whole = end - pos - 1 == name.size();
    const HtmlEntity* entity = nullptr;
    if (whole && end < text.size() && text[end] == ';') {
      entity = FindEntity(name);
      if (entity != nullptr) ++end;
    }
    while (entity == nullptr && name.size() >= 2) {
      entity = FindEntity(name);
      if (entity != nullptr && (entity->flags & kBare) == 0) entity = nullptr;
      if (entity != nullptr) {
        end = pos + 1 + name.size();
      } else {
        name.pop_back();
      }
    }
    if (entity != nullptr) {
      Append(*entity, out);
    } else {
      out.append(text.substr(pos, end - pos));
    }
    pos = end;
  }
  return out;
}

std::u32string UnescapeClosedEntities(std::u32string_view text) {
  constexpr size_t kMaxName = 24;
  std::u32string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    if (text[pos] != '&') {
      out.push_back(text[pos++]);
      continue;
    }
    const size_t start = pos++;
    const bool numeric = pos < text.size() && text[pos] == '#';
    if (numeric) ++pos;
    std::string name;
    while (pos < text.size() && (IsDigit(text[pos]) || IsLetter(text[pos]))) {
      if (name.size() <= kMaxName) name.push_back(static_cast<char>(text[pos]));
      ++pos;
    }
    if (name.empty() || name.size() > kMaxName || pos == text.size() || text[pos] != ';') {
      out.append(text.substr(start, pos - start));
      continue;
    }
    ++pos;  // the semicolon
    if (numeric) {
      auto number = ParseNumeric(text, start);
      // ftfy takes a semicolon in the result for a sign that the reference was not understood.
      if (!number || number->end != pos || number->value == U';') {
        out.append(text.substr(start, pos - start));
      } else if (number->value) {
        out.push_back(*number->value);
      }
      continue;
    }
    const HtmlEntity* entity = FindEntity(name);
    const bool no_small =
        std::none_of(name.begin(), name.end(), [](char c) { return c >= 'a' && c <= 'z'; });
    if (entity == nullptr && no_small) {
      std::string small = name;
      std::transform(small.begin(), small.end(), small.begin(),
                     [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
      entity = FindEntity(small);
      if (entity != nullptr && (entity->flags & kUpper) == 0) entity = nullptr;
      if (entity != nullptr) {
        if (const HtmlEntity* capital = Find(std::begin(kCapitals), std::end(kCapitals), small)) {
          entity = capital;
        }
      }
    }
    if (entity != nullptr) {
      Append(*entity, out);
    } else {
      out.append(text.substr(start, pos - start));
    }
  }
  return out;
}

}  // namespace dlo
