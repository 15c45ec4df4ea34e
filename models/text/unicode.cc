#include "models/text/unicode.h"

#include <utf8proc.h>

#include <algorithm>

namespace dlo {

char32_t NextCodePoint(absl::string_view bytes, size_t& pos) {
  utf8proc_int32_t point = 0;
  utf8proc_ssize_t length =
      utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(bytes.data()) + pos,
                       static_cast<utf8proc_ssize_t>(bytes.size() - pos), &point);
  if (length <= 0) {
    ++pos;
    return kReplacementCharacter;
  }
  pos += static_cast<size_t>(length);
  return static_cast<char32_t>(point);
}

std::u32string DecodeUtf8(absl::string_view bytes) {
  std::u32string points;
  points.reserve(bytes.size());
  for (size_t pos = 0; pos < bytes.size();) points.push_back(NextCodePoint(bytes, pos));
  return points;
}

void AppendUtf8(char32_t point, std::string& out) {
  if (!utf8proc_codepoint_valid(static_cast<utf8proc_int32_t>(point))) {
    point = kReplacementCharacter;
  }
  utf8proc_uint8_t buffer[4];
  utf8proc_ssize_t length = utf8proc_encode_char(static_cast<utf8proc_int32_t>(point), buffer);
  out.append(reinterpret_cast<const char*>(buffer), static_cast<size_t>(length));
}

std::string EncodeUtf8(std::u32string_view points) {
  std::string bytes;
  bytes.reserve(points.size());
  for (char32_t point : points) AppendUtf8(point, bytes);
  return bytes;
}

std::u32string Normalize(std::u32string_view text, NormalForm form) {
  const bool compose = form == NormalForm::kNfc || form == NormalForm::kNfkc;
  const bool compat = form == NormalForm::kNfkc || form == NormalForm::kNfkd;
  const auto options = static_cast<utf8proc_option_t>(
      UTF8PROC_STABLE | (compose ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
      (compat ? UTF8PROC_COMPAT : 0));
  std::vector<utf8proc_int32_t> points;
  points.reserve(text.size());
  for (char32_t c : text) {
    constexpr int kLongest = 32;  // the longest decomposition in Unicode has 18 code points
    utf8proc_int32_t parts[kLongest];
    int boundary_class = 0;
    utf8proc_ssize_t count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), parts,
                                                     kLongest, options, &boundary_class);
    if (count < 0 || count > kLongest) {
      points.push_back(static_cast<utf8proc_int32_t>(kReplacementCharacter));
    } else {
      points.insert(points.end(), parts, parts + count);
    }
  }
  // Canonical order of each run of marks. utf8proc_decompose would do it in quadratic time.
  auto combining = [](utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; };
  for (auto it = points.begin(); it != points.end();) {
    auto first = std::find_if(it, points.end(), [&](auto c) { return combining(c) != 0; });
    it = std::find_if(first, points.end(), [&](auto c) { return combining(c) == 0; });
    std::stable_sort(first, it, [&](auto a, auto b) { return combining(a) < combining(b); });
  }
  auto length = static_cast<utf8proc_ssize_t>(points.size());
  if (compose) length = utf8proc_normalize_utf32(points.data(), length, options);
  return std::u32string(points.begin(), points.begin() + length);
}

bool IsWhiteSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool IsWordCharacter(char32_t c) {
  if (c == 0x200C || c == 0x200D) return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return false;
  }
}

bool IsDecimalDigit(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c)) == UTF8PROC_CATEGORY_ND;
}

std::vector<size_t> GraphemeBoundaries(absl::string_view text) {
  std::vector<size_t> boundaries;
  utf8proc_int32_t state = 0;
  char32_t previous = 0;
  for (size_t pos = 0; pos < text.size();) {
    const size_t start = pos;
    const char32_t point = NextCodePoint(text, pos);
    if (start == 0 ||
        utf8proc_grapheme_break_stateful(static_cast<utf8proc_int32_t>(previous),
                                         static_cast<utf8proc_int32_t>(point), &state)) {
      boundaries.push_back(start);
    }
    previous = point;
  }
  if (!text.empty()) boundaries.push_back(text.size());
  return boundaries;
}

}  // namespace dlo
