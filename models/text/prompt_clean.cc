#include "models/text/prompt_clean.h"

#include <string_view>

#include "models/text/html_entities.h"
#include "models/text/unicode.h"

namespace dlo {
namespace {

// Passes over one line. Each level of nested escapes takes one: only a hostile prompt needs more,
// and it is not to buy quadratic time with them.
constexpr int kMaxPasses = 64;

// The letters of a Latin ligature or digraph; empty for any other character.
std::u32string_view LatinLigature(char32_t c) {
  switch (c) {
    case 0x0132:
      return U"IJ";
    case 0x0133:
      return U"ij";
    case 0x0149:
      return U"\u02BCn";
    case 0x01C4:
      return U"D\u017D";
    case 0x01C5:
      return U"D\u017E";
    case 0x01C6:
      return U"d\u017E";
    case 0x01C7:
      return U"LJ";
    case 0x01C8:
      return U"Lj";
    case 0x01C9:
      return U"lj";
    case 0x01CA:
      return U"NJ";
    case 0x01CB:
      return U"Nj";
    case 0x01CC:
      return U"nj";
    case 0x01F1:
      return U"DZ";
    case 0x01F2:
      return U"Dz";
    case 0x01F3:
      return U"dz";
    case 0xFB00:
      return U"ff";
    case 0xFB01:
      return U"fi";
    case 0xFB02:
      return U"fl";
    case 0xFB03:
      return U"ffi";
    case 0xFB04:
      return U"ffl";
    case 0xFB05:
      return U"\u017Ft";
    case 0xFB06:
      return U"st";
    default:
      return {};
  }
}

void AppendFixedWidth(char32_t c, std::u32string& out) {
  if (c == 0x3000) {
    out.push_back(' ');
  } else if (c >= 0xFF01 && c <= 0xFFEF) {
    out.append(Normalize(std::u32string_view(&c, 1), NormalForm::kNfkc));
  } else if (c == 0x02BC || (c >= 0x2018 && c <= 0x201B)) {
    out.push_back('\'');
  } else if (c >= 0x201C && c <= 0x201F) {
    out.push_back('"');
  } else {
    out.push_back(c);
  }
}

// C1 controls, ligatures, width, quotes.
std::u32string FixCharacters(std::u32string_view text) {
  std::u32string out;
  out.reserve(text.size());
  for (char32_t c : text) {
    c = Windows1252(c);
    std::u32string_view letters = LatinLigature(c);
    if (letters.empty()) letters = std::u32string_view(&c, 1);
    for (char32_t letter : letters) AppendFixedWidth(letter, out);
  }
  return out;
}

// The end of the terminal escape ESC [ parameters letter at text[pos]; pos if there is none.
size_t TerminalEscapeEnd(std::u32string_view text, size_t pos) {
  if (text.substr(pos, 2) != U"\x1B[") return pos;
  size_t end = pos + 2;
  while (end < text.size() && (text[end] == ';' || IsDecimalDigit(text[end]))) ++end;
  if (end == text.size()) return pos;
  const char32_t letter = text[end];
  const bool is_letter = (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z');
  return is_letter ? end + 1 : pos;
}

bool IsUnwantedControl(char32_t c) {
  return c <= 0x08 || c == 0x0B || (c >= 0x0E && c <= 0x1F) || c == 0x7F ||
         (c >= 0x206A && c <= 0x206F) || c == 0xFEFF || (c >= 0xFFF9 && c <= 0xFFFC);
}

// Line breaks become \n; terminal escapes and control characters go.
std::u32string FixControls(std::u32string_view text) {
  std::u32string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const char32_t c = text[pos];
    if (c == 0x1B) {
      const size_t end = TerminalEscapeEnd(text, pos);
      pos = end == pos ? pos + 1 : end;
    } else if (c == '\r' || c == 0x2028 || c == 0x2029) {
      out.push_back('\n');
      pos += c == '\r' && pos + 1 < text.size() && text[pos + 1] == '\n' ? 2 : 1;
    } else {
      if (!IsUnwantedControl(c)) out.push_back(c);
      ++pos;
    }
  }
  return out;
}

std::u32string FixLine(std::u32string line, bool unescape) {
  for (int pass = 0; pass < kMaxPasses; ++pass) {
    std::u32string fixed = unescape ? UnescapeClosedEntities(line) : line;
    fixed = Normalize(FixControls(FixCharacters(fixed)), NormalForm::kNfc);
    if (fixed == line) break;
    line = std::move(fixed);
  }
  return line;
}

std::u32string FixText(std::u32string_view text) {
  std::u32string out;
  bool unescape = true;
  while (!text.empty()) {
    const size_t newline = text.find(U'\n');
    const size_t length = newline == std::u32string_view::npos ? text.size() : newline + 1;
    const std::u32string_view line = text.substr(0, length);
    // Text with markup in it is meant to have its escapes: from the first such line on ftfy leaves
    // them alone.
    if (line.find(U'<') != std::u32string_view::npos) unescape = false;
    out.append(FixLine(std::u32string(line), unescape));
    text.remove_prefix(length);
  }
  return out;
}

bool IsPythonSpace(char32_t c) { return IsWhiteSpace(c) || (c >= 0x1C && c <= 0x1F); }

std::u32string CollapseWhiteSpace(std::u32string_view text) {
  std::u32string out;
  out.reserve(text.size());
  bool pending = false;
  for (char32_t c : text) {
    if (IsPythonSpace(c)) {
      pending = true;
      continue;
    }
    if (pending && !out.empty()) out.push_back(' ');
    pending = false;
    out.push_back(c);
  }
  return out;
}

}  // namespace

std::string CleanPrompt(absl::string_view text) {
  const std::u32string fixed = FixText(DecodeUtf8(text));
  return EncodeUtf8(CollapseWhiteSpace(UnescapeHtml(UnescapeHtml(fixed))));
}

}  // namespace dlo
