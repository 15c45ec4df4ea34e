#include <cstdint>

#include "tests/fuzz/safetensors_fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto input = absl::MakeConstSpan(reinterpret_cast<const std::byte*>(data), size);
  dlo::RunSafetensorsFile(input);
  dlo::RunSafetensorsJson(input);
  return 0;
}
