// Character references of HTML5 in text: `&eacute;`, `&#233;`, `&#xE9;`.
//
//   UnescapeHtml(U"1 &lt 2 &notin; &notit;");         // U"1 < 2 ∉ ¬it;"
//   UnescapeClosedEntities(U"1 &lt 2 &notin; &EACUTE;");   // U"1 &lt 2 ∉ É"
//
// Pure functions, safe from any thread. Nothing fails: what is no reference stays as it is.
#pragma once

#include <string>
#include <string_view>

namespace dlo {

// html.unescape of Python: the rules of the HTML5 standard, with references that lack their
// semicolon and longest known prefixes.
std::u32string UnescapeHtml(std::u32string_view text);

// unescape_html of ftfy 6.3: only references with a semicolon, but also the all-capitals spelling
// of names in small letters.
std::u32string UnescapeClosedEntities(std::u32string_view text);

// Windows-1252's reading of a C1 control (U+0080 to U+009F); the five that it does not assign stay.
char32_t Windows1252(char32_t c1);

}  // namespace dlo
