#include "base/utf8.h"

namespace dlo {

size_t FindInvalidUtf8(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  size_t pos = 0;
  while (pos < text.size()) {
    const unsigned char lead = byte(pos);
    if (lead < 0x80) {
      ++pos;
      continue;
    }
    size_t length = 0;
    unsigned char second_min = 0x80, second_max = 0xbf;
    if (lead >= 0xc2 && lead <= 0xdf) length = 2;
    if (lead >= 0xe0 && lead <= 0xef) length = 3;
    if (lead >= 0xf0 && lead <= 0xf4) length = 4;
    if (lead == 0xe0) second_min = 0xa0;  // overlong
    if (lead == 0xed) second_max = 0x9f;  // surrogates
    if (lead == 0xf0) second_min = 0x90;  // overlong
    if (lead == 0xf4) second_max = 0x8f;  // above U+10FFFF
    if (length == 0 || pos + length > text.size()) return pos;
    if (byte(pos + 1) < second_min || byte(pos + 1) > second_max) return pos;
    for (size_t i = 2; i < length; ++i) {
      if ((byte(pos + i) & 0xc0) != 0x80) return pos;
    }
    pos += length;
  }
  return absl::string_view::npos;
}

}  // namespace dlo
