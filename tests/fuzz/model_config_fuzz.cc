#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "models/wan/wan_config.h"
#include "models/wan/wan_test_repository.h"
#include "tests/fuzz/host_weights_fuzz.h"

namespace dlo {
namespace {

void Promise(bool kept, const char* what) {
  if (kept) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

void CheckTransformer(const WanTransformerConfig& config) {
  Promise(config.num_layers > 0 && config.num_layers <= 4096, "there are some blocks");
  const auto positive = [](int64_t size) { return size > 0 && size <= int64_t{1} << 31; };
  Promise(positive(config.hidden_size()) && positive(config.ffn_dim) &&
              positive(config.in_channels) && positive(config.out_channels) &&
              positive(config.text_dim) && positive(config.freq_dim),
          "sizes are positive and of a size to compute with");
}

}  // namespace

bool RunModelConfig(absl::Span<const std::byte> data) {
  const std::string text(reinterpret_cast<const char*>(data.data()), data.size());
  bool accepted = false;
  for (const char* file : {"model_index.json", "transformer/config.json", "vae/config.json",
                           "text_encoder/config.json", "scheduler/scheduler_config.json"}) {
    WanTestRepository repository;
    repository.WriteText(file, text);
    const absl::StatusOr<WanConfig> config = ReadWanConfig(repository.root());
    if (config.ok()) {
      accepted = true;
      CheckTransformer(config->transformer);
      continue;
    }
    const absl::StatusCode code = config.status().code();
    Promise(code == absl::StatusCode::kInvalidArgument ||
                code == absl::StatusCode::kUnimplemented || code == absl::StatusCode::kNotFound,
            "a refusal is INVALID_ARGUMENT, UNIMPLEMENTED or NOT_FOUND");
    Promise(config.status().message().find("json") != absl::string_view::npos, "it names a file");
    Promise(config.status().message().size() < 65536, "it stays short");
  }
  return accepted;
}

}  // namespace dlo
