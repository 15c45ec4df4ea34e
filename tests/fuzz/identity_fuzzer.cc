#include <cstdint>

#include "tests/fuzz/host_weights_fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  dlo::RunIdentity(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(data), size));
  return 0;
}
