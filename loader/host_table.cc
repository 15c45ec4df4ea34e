#include "loader/host_table.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/sigbus_guard.h"
#include "base/status_macros.h"
#include "loader/cast.h"
#include "loader/messages.h"
#include "loader/weights.h"

namespace dlo {

absl::StatusOr<HostTable> HostTable::Create(std::shared_ptr<const Checkpoint> checkpoint,
                                            const TensorSpec& spec) {
  // Whatever else the checkpoint holds is not looked at here.
  RETURN_IF_ERROR(CheckTensors(*checkpoint, {spec}, {.partial = true}));
  if (spec.shape.size() != 2) {
    return absl::InvalidArgumentError(
        absl::StrCat(QuoteForMessage(spec.name), " is no table: ", ShapeText(spec.shape)));
  }
  std::optional<TensorSource> source = checkpoint->Find(spec.name);
  for (size_t i = 0; !source && i < spec.aliases.size(); ++i) {
    source = checkpoint->Find(spec.aliases[i]);
  }
  return HostTable(std::move(checkpoint), spec, *source);
}

absl::Status HostTable::ReadRows(absl::Span<const int64_t> rows, std::byte* to) const {
  const int64_t stored_row_bytes = row_elements() * DTypeBytes(source_.dtype);
  std::vector<std::byte> stored(static_cast<size_t>(stored_row_bytes));
  const std::string what = absl::StrCat("tensor ", QuoteForMessage(source_.name));
  for (int64_t row : rows) {
    if (row < 0 || row >= num_rows()) {
      return absl::InvalidArgumentError(
          absl::StrCat("row ", row, " of ", what, " with ", num_rows(), " rows"));
    }
    if (!GuardedCopy(stored.data(), source_.data.data() + row * stored_row_bytes,
                     stored_row_bytes)) {
      return source_.mapping->LostBytes(what);
    }
    CastElements(source_.dtype, stored.data(), dtype(), to, static_cast<size_t>(row_elements()));
    to += row_bytes();
  }
  return source_.mapping->CheckUnchanged().ok() ? absl::OkStatus()
                                                : source_.mapping->LostBytes(what);
}

}  // namespace dlo
