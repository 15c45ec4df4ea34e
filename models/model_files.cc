#include "models/model_files.h"

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "loader/checkpoint.h"
#include "loader/weights.h"
#include "models/text/t5_tokenizer.h"
#include "models/umt5/umt5_specs.h"
#include "models/wan/transformer_specs.h"
#include "models/wan/vae_specs.h"
#include "models/wan/wan_card.h"

namespace dlo {
namespace {

absl::StatusOr<std::string> CheckComponent(const std::filesystem::path& root,
                                           const std::string& name,
                                           const std::vector<TensorSpec>& specs,
                                           std::vector<std::string> ignore_unexpected) {
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(root / name));
  LoadOptions options;
  options.ignore_unexpected = std::move(ignore_unexpected);
  RETURN_IF_ERROR(CheckTensors(checkpoint, specs, options));
  int64_t bytes = 0;
  for (const TensorSpec& spec : specs) bytes += spec.bytes();
  const size_t files = checkpoint.files().size();
  return absl::StrFormat("%s: %d tensors in %d file%s, %.1f MB in memory", name, specs.size(),
                         files, files == 1 ? "" : "s", static_cast<double>(bytes) / 1e6);
}

}  // namespace

absl::StatusOr<std::vector<std::string>> CheckModelFiles(const std::filesystem::path& root,
                                                         DType dtype) {
  // The card's own checks include the defaults of an optional dlo.json.
  RETURN_IF_ERROR(ReadWanCard(root).status());
  ASSIGN_OR_RETURN(const WanConfig config, ReadWanConfig(root));
  std::vector<std::string> lines;

  ASSIGN_OR_RETURN(const std::unique_ptr<T5Tokenizer> tokenizer,
                   T5Tokenizer::Load(root / "tokenizer"));
  if (tokenizer->vocab_size() > config.text_encoder.vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        (root / "tokenizer").string(), ": makes ids up to ", tokenizer->vocab_size() - 1,
        ", but the text encoder has vocab_size ", config.text_encoder.vocab_size));
  }
  lines.push_back(absl::StrCat("tokenizer: ", tokenizer->vocab_size(), " ids"));

  const auto check = [&](const std::string& name, const std::vector<TensorSpec>& specs,
                         std::vector<std::string> ignore_unexpected) -> absl::Status {
    ASSIGN_OR_RETURN(std::string line,
                     CheckComponent(root, name, specs, std::move(ignore_unexpected)));
    lines.push_back(std::move(line));
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(check("text_encoder", Umt5Specs(config.text_encoder, dtype), {}));
  RETURN_IF_ERROR(
      check("transformer", WanTransformerSpecs(config.transformer, dtype), {"norm_added_q"}));
  if (config.transformer_2) {
    RETURN_IF_ERROR(check("transformer_2", WanTransformerSpecs(*config.transformer_2, dtype),
                          {"norm_added_q"}));
  }
  // Text to video never encodes a video.
  RETURN_IF_ERROR(
      check("vae", WanVaeSpecs(config.vae, /*encoder=*/false), {"encoder.", "quant_conv."}));
  return lines;
}

}  // namespace dlo
