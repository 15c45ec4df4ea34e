// What this folder needs to know of Unicode: UTF-8 that nobody has validated, normal forms,
// character classes, graphemes.
//
//   std::u32string points = DecodeUtf8("cafe\xCC\x81");      // U"cafe\u0301"
//   std::string bytes = EncodeUtf8(Normalize(points, NormalForm::kNfc));   // "café"
//
// Pure functions, safe from any thread. Nothing fails: a byte that is not part of well-formed UTF-8
// becomes U+FFFD, and so does a code point that is none (a surrogate, or above U+10FFFF). The data
// is utf8proc's.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/string_view.h"

namespace dlo {

inline constexpr char32_t kReplacementCharacter = 0xFFFD;

std::u32string DecodeUtf8(absl::string_view bytes);
void AppendUtf8(char32_t point, std::string& out);
std::string EncodeUtf8(std::u32string_view points);

// Decodes the code point at `bytes[pos]` and moves `pos` past it. Requires pos < bytes.size().
char32_t NextCodePoint(absl::string_view bytes, size_t& pos);

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

// In n log n, also for runs of combining marks without end.
std::u32string Normalize(std::u32string_view text, NormalForm form);

// The property White_Space. Python's str.isspace() is this and U+001C to U+001F.
bool IsWhiteSpace(char32_t point);

// Letters, marks, decimal digits, connectors and joiners: \w of a Unicode regular expression.
bool IsWordCharacter(char32_t point);

// Decimal digits of any script: \d of a Unicode regular expression.
bool IsDecimalDigit(char32_t point);

// The offsets at which extended grapheme clusters of `text` begin, and text.size() last. Empty for
// an empty text.
std::vector<size_t> GraphemeBoundaries(absl::string_view text);

}  // namespace dlo
