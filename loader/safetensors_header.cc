#include <algorithm>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "loader/messages.h"
#include "loader/safetensors.h"
#include "loader/safetensors_format.h"

namespace dlo {
namespace {

// A tensor's entry as the header states it, before any of it is believed.
struct RawEntry {
  std::optional<std::string> dtype;
  std::optional<std::vector<int64_t>> shape;
  std::optional<std::vector<int64_t>> offsets;
};

// Reads the header event by event and refuses whatever the current position does not want. Keeps no
// tree and does not recurse, so hostile depth or size costs nothing; and it sees duplicate keys,
// which a tree hides.
class HeaderSax : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::map<std::string, RawEntry> entries;
  std::map<std::string, std::string> metadata;

  bool start_object(size_t) override {
    switch (at_) {
      case At::kStart:
        return Go(At::kTop);
      case At::kTensorValue:
        return Go(At::kTensor);
      case At::kMetadataValue:
        return Go(At::kMetadata);
      default:
        return Refuse("an object");
    }
  }

  bool key(string_t& name) override {
    switch (at_) {
      case At::kTop:
        if (name == kSafetensorsMetadataKey) {
          if (seen_metadata_) return Duplicate(name, "");
          seen_metadata_ = true;
          return Go(At::kMetadataValue);
        }
        tensor_ = name;
        entry_ = {};
        if (entries.count(name) != 0) return Duplicate(name, "");
        return Go(At::kTensorValue);
      case At::kTensor:
        if (name == "dtype") {
          return entry_.dtype ? Duplicate(name, Where()) : Go(At::kDtypeValue);
        }
        if (name == "shape") {
          return entry_.shape ? Duplicate(name, Where()) : Go(At::kShapeValue);
        }
        if (name == "data_offsets") {
          return entry_.offsets ? Duplicate(name, Where()) : Go(At::kOffsetsValue);
        }
        return Refuse(absl::StrCat("the key ", QuoteForMessage(name)));
      case At::kMetadata:
        if (metadata.count(name) != 0) return Duplicate(name, " in __metadata__");
        metadata_key_ = name;
        return Go(At::kMetadataString);
      default:
        return Refuse(absl::StrCat("the key ", QuoteForMessage(name)));
    }
  }

  bool end_object() override {
    switch (at_) {
      case At::kTop:
        return Go(At::kEnd);
      case At::kTensor:
        if (!entry_.dtype) return Missing("dtype");
        if (!entry_.shape) return Missing("shape");
        if (!entry_.offsets) return Missing("data_offsets");
        entries.emplace(tensor_, std::move(entry_));
        return Go(At::kTop);
      case At::kMetadata:
        return Go(At::kTop);
      default:
        return Refuse("the end of an object");
    }
  }

  bool start_array(size_t) override {
    switch (at_) {
      case At::kShapeValue:
        entry_.shape.emplace();
        return Go(At::kShape);
      case At::kOffsetsValue:
        entry_.offsets.emplace();
        return Go(At::kOffsets);
      default:
        return Refuse("an array");
    }
  }

  bool end_array() override {
    if (at_ == At::kShape) return Go(At::kTensor);
    if (at_ == At::kOffsets && entry_.offsets->size() == 2) return Go(At::kTensor);
    return Refuse("the end of an array");
  }

  bool number_unsigned(number_unsigned_t value) override {
    std::vector<int64_t>* target = nullptr;
    if (at_ == At::kShape && entry_.shape->size() < kSafetensorsRankMax) target = &*entry_.shape;
    if (at_ == At::kOffsets && entry_.offsets->size() < 2) target = &*entry_.offsets;
    if (target == nullptr || value > static_cast<uint64_t>(INT64_MAX)) {
      return Refuse(absl::StrCat("the number ", value));
    }
    target->push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    switch (at_) {
      case At::kDtypeValue:
        entry_.dtype = std::move(value);
        return Go(At::kTensor);
      case At::kMetadataString:
        metadata.emplace(std::move(metadata_key_), std::move(value));
        return Go(At::kMetadata);
      default:
        return Refuse(absl::StrCat("the string ", QuoteForMessage(value)));
    }
  }

  bool null() override { return Refuse("null"); }
  bool boolean(bool) override { return Refuse("a boolean"); }
  bool number_integer(number_integer_t value) override {
    return Refuse(absl::StrCat("the negative number ", value));
  }
  bool number_float(number_float_t, const string_t& text) override {
    return Refuse(absl::StrCat("the number ", QuoteForMessage(text)));
  }
  bool binary(binary_t&) override { return Refuse("binary data"); }

  bool parse_error(size_t position, const std::string& last_token,
                   const nlohmann::detail::exception& exception) override {
    // The library's text: "[json.exception...] parse error at ...: REASON; last read: 'ALL OF THE
    // TOKEN'".
    absl::string_view reason = exception.what();
    reason.remove_prefix(std::min(reason.size(), reason.find("] ") + 2));
    reason = reason.substr(0, std::min<size_t>(reason.find("; last read"), 200));
    return Fail(absl::StrCat("invalid JSON at byte ", position, " near ",
                             QuoteForMessage(last_token), ": ", absl::CHexEscape(reason)));
  }

  const std::string& error() const { return error_; }

 private:
  // What the current position wants.
  std::string Expected() const {
    switch (at_) {
      case At::kStart:
        return "an object";
      case At::kTop:
        return "a tensor's name";
      case At::kTensorValue:
        return absl::StrCat("an object", Where());
      case At::kTensor:
        return absl::StrCat("the key dtype, shape or data_offsets", Where());
      case At::kDtypeValue:
        return absl::StrCat("a string as dtype", Where());
      case At::kShapeValue:
      case At::kShape:
        return absl::StrCat("at most ", kSafetensorsRankMax,
                            " non-negative 64-bit integers as shape", Where());
      case At::kOffsetsValue:
      case At::kOffsets:
        return absl::StrCat("two non-negative 64-bit integers as data_offsets", Where());
      case At::kMetadataValue:
        return "an object as __metadata__";
      case At::kMetadata:
        return "a key of __metadata__";
      case At::kMetadataString:
        return absl::StrCat("a string as ", QuoteForMessage(metadata_key_), " in __metadata__");
      case At::kEnd:
        return "the end of the header";
    }
    return "";
  }

  enum class At {
    kStart,
    kTop,
    kTensorValue,
    kTensor,
    kDtypeValue,
    kShapeValue,
    kShape,
    kOffsetsValue,
    kOffsets,
    kMetadataValue,
    kMetadata,
    kMetadataString,
    kEnd,
  };

  bool Refuse(absl::string_view found) {
    return Fail(absl::StrCat("expected ", Expected(), ", found ", found));
  }
  bool Fail(std::string error) {
    error_ = std::move(error);
    return false;
  }
  bool Go(At at) {
    at_ = at;
    return true;
  }
  std::string Where() const { return absl::StrCat(" of tensor ", QuoteForMessage(tensor_)); }
  bool Duplicate(const std::string& name, const std::string& where) {
    return Fail(absl::StrCat("duplicate key ", QuoteForMessage(name), where));
  }
  bool Missing(absl::string_view what) { return Fail(absl::StrCat("no ", what, Where())); }

  std::string error_;
  At at_ = At::kStart;
  bool seen_metadata_ = false;
  std::string tensor_;
  std::string metadata_key_;
  RawEntry entry_;
};

uint64_t LittleEndian64(absl::Span<const std::byte> bytes) {
  uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | std::to_integer<uint64_t>(bytes[i]);
  return value;
}

// Fills `entry` and checks the tensor on its own, whatever the others are.
absl::Status CheckEntry(const RawEntry& raw, int64_t data_offset, int64_t data_bytes,
                        SafetensorsEntry& entry) {
  absl::StatusOr<DType> dtype = ParseDType(*raw.dtype);
  if (!dtype.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("unknown dtype ", QuoteForMessage(*raw.dtype)));
  }
  const int64_t begin = (*raw.offsets)[0];
  const int64_t end = (*raw.offsets)[1];
  if (begin > end) {
    return absl::InvalidArgumentError(
        absl::StrCat("data_offsets [", begin, ", ", end, "] end before they begin"));
  }
  if (end > data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("data_offsets [", begin, ", ", end, "] reach beyond the ", data_bytes,
                     " bytes of data in the file; it may be truncated"));
  }
  std::optional<int64_t> bytes = TensorBytes(*raw.shape, *dtype);
  if (!bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the byte count of shape ", ShapeText(*raw.shape), " overflows 64 bits"));
  }
  if (*bytes != end - begin) {
    return absl::InvalidArgumentError(absl::StrCat("shape ", ShapeText(*raw.shape), " of ",
                                                   *raw.dtype, " takes ", *bytes,
                                                   " bytes, but data_offsets span ", end - begin));
  }
  entry = {.dtype = *dtype, .shape = *raw.shape, .offset = data_offset + begin, .bytes = *bytes};
  return absl::OkStatus();
}

// The tensors must cover [data_offset, file_size) without gap or overlap. Each is known to lie
// inside. Returns what is wrong.
std::string CheckCoverage(const std::map<std::string, SafetensorsEntry>& tensors,
                          int64_t data_offset, int64_t file_size) {
  std::vector<const std::pair<const std::string, SafetensorsEntry>*> order;
  order.reserve(tensors.size());
  for (const auto& item : tensors) order.push_back(&item);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.offset, a->second.bytes) <
           std::pair(b->second.offset, b->second.bytes);
  });
  int64_t end = data_offset;
  const std::string* previous = nullptr;
  for (const auto* item : order) {
    const auto& [name, entry] = *item;
    if (entry.offset < end) {
      return absl::StrCat("tensor ", QuoteForMessage(name), " overlaps tensor ",
                          QuoteForMessage(*previous));
    }
    if (entry.offset > end) {
      return absl::StrCat("there is a gap of ", entry.offset - end, " bytes before tensor ",
                          QuoteForMessage(name));
    }
    end += entry.bytes;
    previous = &name;
  }
  if (end != file_size) {
    return absl::StrCat(file_size - end, " bytes follow the last tensor",
                        previous == nullptr ? "" : absl::StrCat(" ", QuoteForMessage(*previous)));
  }
  return "";
}

// Empty, or what is wrong.
std::string RunParser(absl::string_view text, HeaderSax& handler) {
  // The lexer takes a NUL byte for the end of its input and would not look at what follows.
  if (size_t nul = text.find('\0'); nul != text.npos) {
    return absl::StrCat("invalid JSON: NUL byte at ", nul);
  }
  try {
    if (nlohmann::json::sax_parse(text.begin(), text.end(), &handler)) return "";
  } catch (const std::bad_alloc&) {
    return "not enough memory to parse its JSON";
  }
  return handler.error();
}

}  // namespace

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::Span<const std::byte> prefix,
                                                         int64_t file_size,
                                                         absl::string_view name) {
  auto refuse = [name](auto&&... parts) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": ", parts...));
  };
  if (file_size < kSafetensorsLengthBytes ||
      static_cast<int64_t>(prefix.size()) < kSafetensorsLengthBytes) {
    return refuse("not a safetensors file: ", file_size, " bytes, too short for a header");
  }
  const uint64_t length = LittleEndian64(prefix);
  if (length == 0) return refuse("the header length is 0");
  if (length > kSafetensorsHeaderBytesMax) {
    return refuse("the header length ", length, " is more than 100 MB; not a safetensors file?");
  }
  const int64_t data_offset = kSafetensorsLengthBytes + static_cast<int64_t>(length);
  if (data_offset > file_size || data_offset > static_cast<int64_t>(prefix.size())) {
    return refuse("the header of ", length, " bytes reaches beyond the file of ", file_size,
                  " bytes; it may be truncated");
  }
  absl::string_view json(reinterpret_cast<const char*>(prefix.data()) + kSafetensorsLengthBytes,
                         static_cast<size_t>(length));
  if (json[0] != '{') {
    return refuse("the header starts with ", QuoteForMessage(json.substr(0, 1)),
                  ", not with \"{\"");
  }

  HeaderSax sax;
  if (std::string error = RunParser(json, sax); !error.empty()) {
    return refuse("header: ", error);
  }
  SafetensorsHeader header;
  header.metadata = std::move(sax.metadata);
  for (const auto& [tensor, raw] : sax.entries) {
    SafetensorsEntry entry;
    if (absl::Status status = CheckEntry(raw, data_offset, file_size - data_offset, entry);
        !status.ok()) {
      return refuse("tensor ", QuoteForMessage(tensor), ": ", status.message());
    }
    header.tensors.emplace_hint(header.tensors.end(), tensor, std::move(entry));
  }
  if (std::string error = CheckCoverage(header.tensors, data_offset, file_size); !error.empty()) {
    return refuse(error);
  }
  return header;
}

}  // namespace dlo
