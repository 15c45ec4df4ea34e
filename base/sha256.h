// SHA-256 of bytes that arrive in pieces.
//
//   Sha256 hash;
//   hash.Update(chunk);
//   std::string hex = hash.Finish();  // 64 lower-case hexadecimal digits
//
// One thread at a time; Finish once.
#pragma once

#include <memory>
#include <string>

#include "absl/strings/string_view.h"

struct evp_md_ctx_st;

namespace dlo {

class Sha256 {
 public:
  Sha256();
  void Update(absl::string_view bytes);
  std::string Finish();

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

// Of bytes that are all there.
std::string Sha256Of(absl::string_view bytes);

}  // namespace dlo
