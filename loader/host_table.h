// A matrix of which few rows are needed at a time, such as a text encoder's token table: it stays
// in its checkpoint's pages, and rows are read and cast when they are asked for.
//
//   ASSIGN_OR_RETURN(HostTable table, HostTable::Create(checkpoint, spec));
//   RETURN_IF_ERROR(table.ReadRows(ids, rows.data()));   // ids.size() * table.row_bytes() bytes
//
// Copyable; shares the checkpoint with its copies. const members may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/tensor_spec.h"
#include "loader/checkpoint.h"

namespace dlo {

class HostTable {
 public:
  // `spec` is a matrix of the checkpoint, under its name or an alias. Errors as LoadTensors.
  static absl::StatusOr<HostTable> Create(std::shared_ptr<const Checkpoint> checkpoint,
                                          const TensorSpec& spec);

  int64_t num_rows() const { return spec_.shape[0]; }
  int64_t row_elements() const { return spec_.shape[1]; }
  DType dtype() const { return spec_.dtype; }
  int64_t row_bytes() const { return row_elements() * DTypeBytes(dtype()); }

  // The rows one after the other, in the spec's dtype, rounded as LoadTensors rounds.
  // INVALID_ARGUMENT for a row that does not exist; DATA_LOSS, naming tensor and file, if the file
  // changed since the checkpoint was opened or cannot be read.
  absl::Status ReadRows(absl::Span<const int64_t> rows, std::byte* to) const;

 private:
  HostTable(std::shared_ptr<const Checkpoint> checkpoint, TensorSpec spec, TensorSource source)
      : checkpoint_(std::move(checkpoint)), spec_(std::move(spec)), source_(source) {}

  std::shared_ptr<const Checkpoint> checkpoint_;  // what source_ points into
  TensorSpec spec_;
  TensorSource source_;
};

}  // namespace dlo
