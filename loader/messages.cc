#include "loader/messages.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace dlo {

std::string QuoteForMessage(absl::string_view text) {
  constexpr size_t kMaxBytes = 160;
  bool cut = text.size() > kMaxBytes;
  if (cut) {
    size_t end = kMaxBytes;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
    text = text.substr(0, end);
  }
  bool utf8 = true;
  try {
    (void)nlohmann::json(std::string(text)).dump();
  } catch (const nlohmann::json::exception&) {
    utf8 = false;
  }
  return absl::StrCat("\"", utf8 ? absl::Utf8SafeCEscape(text) : absl::CHexEscape(text),
                      cut ? "..." : "", "\"");
}

std::string ShapeText(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

void Offenders::Add(std::string what) {
  constexpr size_t kShown = 4;
  if (++count_ <= kShown) shown_.push_back(std::move(what));
}

std::string Offenders::Text() const {
  return absl::StrCat(count_, " in all: ", absl::StrJoin(shown_, ", "),
                      count_ > shown_.size() ? ", ..." : "");
}

}  // namespace dlo
