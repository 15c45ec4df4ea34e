#include "base/utf8.h"

#include <gtest/gtest.h>

#include <string>

namespace dlo {
namespace {

constexpr size_t kValid = absl::string_view::npos;

TEST(Utf8Test, FindsTheFirstByteThatIsNotPartOfWellFormedText) {
  const struct {
    absl::string_view text;
    size_t first_invalid;
  } kCases[] = {
      {"", kValid},
      {"plain", kValid},
      {"caf\xC3\xA9", kValid},
      {"\xE2\x82\xAC and \xF0\x9F\x8E\xA5", kValid},
      {"\xED\x9F\xBF\xEE\x80\x80", kValid},  // the neighbours of the surrogates
      {"\xF4\x8F\xBF\xBF", kValid},          // U+10FFFF
      {"a\xFFz", 1},
      {"ab\x80", 2},            // continues nothing
      {"\xC0\xAF", 0},          // overlong
      {"\xE0\x80\x80", 0},      // overlong
      {"\xF0\x8F\xBF\xBF", 0},  // overlong
      {"x\xED\xA0\x80", 1},     // a surrogate
      {"\xF4\x90\x80\x80", 0},  // above U+10FFFF
      {"\xF5\x80\x80\x80", 0},
      {"ok\xE2\x82", 2},  // cut
      {"ok\xE2\x82z", 2},
      {"\xF0\x9F\x8Ez", 0},
  };
  for (const auto& c : kCases) EXPECT_EQ(FindInvalidUtf8(c.text), c.first_invalid) << c.text;
  EXPECT_EQ(FindInvalidUtf8(absl::string_view("a\0b", 3)), kValid);
}

}  // namespace
}  // namespace dlo
