// Early return for absl::Status and absl::StatusOr.
//
//   absl::StatusOr<int> Sum() {
//     ASSIGN_OR_RETURN(int a, First());
//     RETURN_IF_ERROR(Check(a));
//     return a + 1;
//   }
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define DLO_CONCAT_INNER(a, b) a##b
#define DLO_CONCAT(a, b) DLO_CONCAT_INNER(a, b)

#define RETURN_IF_ERROR(expr)                                 \
  do {                                                        \
    if (absl::Status dlo_status = (expr); !dlo_status.ok()) { \
      return dlo_status;                                      \
    }                                                         \
  } while (false)

// NOLINTBEGIN(bugprone-macro-parentheses): `lhs` may be a declaration.
#define ASSIGN_OR_RETURN(lhs, expr) \
  DLO_ASSIGN_OR_RETURN(DLO_CONCAT(dlo_status_or_, __LINE__), lhs, expr)
#define DLO_ASSIGN_OR_RETURN(tmp, lhs, expr)     \
  auto tmp = (expr);                             \
  if (!tmp.ok()) return std::move(tmp).status(); \
  lhs = *std::move(tmp)
// NOLINTEND(bugprone-macro-parentheses)
