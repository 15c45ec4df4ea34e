// Prompt cleaning as diffusers does it before it tokenises: prompt_clean of diffusers 0.42 with
// ftfy 6.3 installed.
//
//   std::string clean = CleanPrompt("  Tom &amp;amp; “Jerry”\n");   // Tom & "Jerry"
//
// In order:
// 1. ftfy.fix_text, repeated until nothing changes: entities with a semicolon (at all levels, but
//    only up to the first line that has a `<`), C1 controls as Windows-1252, Latin ligatures, half
//    and full width forms, curly quotes, line breaks, terminal escapes, control characters, NFC.
// 2. html.unescape, twice: also entities without a semicolon, by the longest known prefix.
// 3. Runs of white space (Python's \s) become one space; none is left at either end.
//
// Left out: ftfy's repair of mojibake (text once decoded with the wrong encoding, such as "Ã©" for
// "é"). It guesses, and a prompt that arrives as UTF-8 has not been through that.
//
// A pure function, safe from any thread. Nothing fails: bytes that are not UTF-8 become U+FFFD. An
// empty result is valid.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace dlo {

std::string CleanPrompt(absl::string_view text);

}  // namespace dlo
