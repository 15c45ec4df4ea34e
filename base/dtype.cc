#include "base/dtype.h"

#include "absl/strings/str_cat.h"

namespace dlo {
namespace {

struct Entry {
  DType dtype;
  absl::string_view name;
  int64_t bytes;
};

constexpr Entry kEntries[] = {
    {DType::kF32, "F32", 4},   {DType::kF16, "F16", 2},        {DType::kBF16, "BF16", 2},
    {DType::kF64, "F64", 8},   {DType::kI64, "I64", 8},        {DType::kI32, "I32", 4},
    {DType::kI16, "I16", 2},   {DType::kI8, "I8", 1},          {DType::kU8, "U8", 1},
    {DType::kBool, "BOOL", 1}, {DType::kF8E4M3, "F8_E4M3", 1}, {DType::kF8E5M2, "F8_E5M2", 1},
};

}  // namespace

int64_t DTypeBytes(DType dtype) { return kEntries[static_cast<int>(dtype)].bytes; }

absl::string_view DTypeName(DType dtype) { return kEntries[static_cast<int>(dtype)].name; }

absl::StatusOr<DType> ParseDType(absl::string_view name) {
  for (const Entry& entry : kEntries) {
    if (entry.name == name) return entry.dtype;
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown dtype \"", name, "\""));
}

}  // namespace dlo
