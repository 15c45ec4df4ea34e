// What the goldens (goldens_test.cc) cannot say: input that is no text, and input made to take
// long.
#include "models/text/prompt_clean.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "models/text/html_entities.h"
#include "models/text/unicode.h"

namespace dlo {
namespace {

std::string Repeat(const std::string& text, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += text;
  return out;
}

TEST(CleanPrompt, BytesThatAreNotUtf8BecomeReplacementCharacters) {
  EXPECT_EQ(CleanPrompt("a\xFF b"), "a\uFFFD b");
  EXPECT_EQ(CleanPrompt("\xE2\x82"), "\uFFFD\uFFFD");
  EXPECT_EQ(CleanPrompt("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD");  // a surrogate
  EXPECT_EQ(CleanPrompt("\xC0\xAF"), "\uFFFD\uFFFD");            // an overlong form
}

TEST(CleanPrompt, NestedEscapesAreUndoneToADepthThatBoundsTheTime) {
  EXPECT_EQ(CleanPrompt(absl::StrCat("&", Repeat("amp;", 50))), "&");
  // 64 levels by the rules of ftfy, two by html.unescape.
  EXPECT_EQ(CleanPrompt(absl::StrCat("&", Repeat("amp;", 1000))),
            absl::StrCat("&", Repeat("amp;", 1000 - 66)));
}

TEST(CleanPrompt, LongRunsOfMarksAreOrdered) {
  const int kMarks = 100000;
  const std::string cleaned = CleanPrompt(absl::StrCat("q", Repeat("\u0301\u0323", kMarks)));
  EXPECT_EQ(cleaned, absl::StrCat("q", Repeat("\u0323", kMarks), Repeat("\u0301", kMarks)));
}

TEST(UnescapeHtml, NumbersOfAnyLengthAreNoOverflow) {
  std::u32string nines = U"&#";
  nines.append(100000, U'9');
  EXPECT_EQ(UnescapeHtml(nines + U";x"), U"\uFFFDx");
}

TEST(UnescapeHtml, KnowsTheWholeTable) {
  EXPECT_EQ(UnescapeHtml(U"&AElig;&zwnj;&nvlt;&acE;"), U"\u00C6\u200C<\u20D2\u223E\u0333");
  EXPECT_EQ(UnescapeHtml(U"&notit; &notin; &ampx &hellip"), U"\u00ACit; \u2209 &x &hellip");
  EXPECT_EQ(UnescapeClosedEntities(U"&NTILDE; &nTILDE; &AMP &Eacute;"),
            U"\u00D1 &nTILDE; &AMP \u00C9");
}

TEST(Normalize, NormalForms) {
  EXPECT_EQ(Normalize(U"e\u0301\u212B", NormalForm::kNfc), U"\u00E9\u00C5");
  EXPECT_EQ(Normalize(U"\u00E9\uAC01", NormalForm::kNfd), U"e\u0301\u1100\u1161\u11A8");
  EXPECT_EQ(Normalize(U"\uFB01\u2460", NormalForm::kNfkc), U"fi1");
  EXPECT_EQ(Normalize(U"\u1E9B\u0323", NormalForm::kNfkd), U"s\u0323\u0307");
}

}  // namespace
}  // namespace dlo
