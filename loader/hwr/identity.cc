#include "loader/hwr/identity.h"

#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "base/utf8.h"
#include "loader/hwr/strict_json.h"

namespace dlo::hwr {
namespace {

using nlohmann::json;

constexpr int kIdentitySchema = 1;
constexpr int kRanksMax = 1 << 16;

// Changed by hand whenever what stands behind the word begins to mean other bytes.
json Implementation() {
  return {{"cast", "round-to-nearest-even-1"},
          {"identity", "1"},
          {"layout", "block-layout-256-1"},
          {"loader", "canonical-1"},
          {"manifest", "1"},
          {"quantize", "e4m3-per-tensor-1"},
          {"restorer", "1"},
          {"source", "content-1"}};
}

// Everything an identity's document says.
struct Fields {
  IdentityInputs inputs;
  std::string representation_name = "dlo-final-layout-v1";
  std::string layout_name = "dlo-parts-v1";
  std::string implementation;
  int64_t manifest_schema = kManifestSchema;
  int64_t restorer_schema = kRestorerSchema;
};

Identity Write(const Fields& fields) {
  const IdentityInputs& in = fields.inputs;
  const json document = {
      {"schema", kIdentitySchema},
      {"source", {{"fingerprint", in.source}}},
      {"model", {{"family", in.family}, {"config", in.model_config}}},
      {"representation",
       {{"name", fields.representation_name},
        {"dtype", in.dtype},
        {"quantization", in.quantization}}},
      {"layout",
       {{"name", fields.layout_name},
        {"digest", in.layout},
        {"tp_size", in.tp_size},
        {"tp_rank", in.tp_rank}}},
      {"adaptation",
       {{"kind", in.adaptation},
        {"fingerprint",
         in.adaptation_fingerprint.empty() ? json() : json(in.adaptation_fingerprint)}}},
      {"producer",
       {{"id", in.producer},
        {"implementation", fields.implementation},
        {"manifest_schema", fields.manifest_schema},
        {"restorer_schema", fields.restorer_schema}}}};
  Identity identity;
  identity.document = document.dump(-1, ' ', /*ensure_ascii=*/true);
  identity.key = Sha256Of(identity.document);
  return identity;
}

absl::Status CheckInputs(const IdentityInputs& in) {
  for (const auto& [name, digest] : {std::pair("source", &in.source),
                                     {"model_config", &in.model_config},
                                     {"layout", &in.layout}}) {
    if (!IsDigest(*digest)) {
      return absl::InvalidArgumentError(absl::StrCat("identity: ", name, " is no digest"));
    }
  }
  for (const auto& [name, word] : {std::pair("family", &in.family),
                                   {"dtype", &in.dtype},
                                   {"quantization", &in.quantization},
                                   {"adaptation", &in.adaptation},
                                   {"producer", &in.producer}}) {
    if (!IsWord(*word)) {
      return absl::InvalidArgumentError(absl::StrCat("identity: ", name, " is no plain word"));
    }
  }
  if (in.tp_size < 1 || in.tp_size > kRanksMax || in.tp_rank < 0 || in.tp_rank >= in.tp_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("identity: no rank ", in.tp_rank, " of ", in.tp_size));
  }
  if (!in.adaptation_fingerprint.empty() && !IsDigest(in.adaptation_fingerprint)) {
    return absl::InvalidArgumentError("identity: adaptation_fingerprint is no digest");
  }
  if ((in.adaptation == "base") != in.adaptation_fingerprint.empty()) {
    return absl::InvalidArgumentError(
        "identity: every adaptation but base has a fingerprint, and base has none");
  }
  return absl::OkStatus();
}

absl::Status CheckCanonical(const json& value, int depth) {
  if (depth > kJsonDepthMax) return absl::InvalidArgumentError("nested too deep");
  if (value.is_binary() || value.is_discarded()) {
    return absl::InvalidArgumentError("a value without a canonical form");
  }
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    return absl::InvalidArgumentError("a number that is not finite");
  }
  if (value.is_string() &&
      FindInvalidUtf8(value.get_ref<const std::string&>()) != absl::string_view::npos) {
    return absl::InvalidArgumentError("text that is not UTF-8");
  }
  if (value.is_object()) {
    for (const auto& [key, item] : value.items()) {
      if (FindInvalidUtf8(key) != absl::string_view::npos)
        return absl::InvalidArgumentError("a key that is not UTF-8");
      RETURN_IF_ERROR(CheckCanonical(item, depth + 1));
    }
  } else if (value.is_array()) {
    for (const json& item : value) RETURN_IF_ERROR(CheckCanonical(item, depth + 1));
  }
  return absl::OkStatus();
}

}  // namespace

bool IsDigest(absl::string_view text) {
  if (text.size() != 64) return false;
  for (const char c : text) {
    if ((c < '0' || c > '9') && (c < 'a' || c > 'f')) return false;
  }
  return true;
}

absl::StatusOr<std::string> CanonicalJson(const json& value) {
  RETURN_IF_ERROR(CheckCanonical(value, 1));
  return value.dump(-1, ' ', /*ensure_ascii=*/true);
}

absl::StatusOr<Identity> MakeIdentity(const IdentityInputs& inputs) {
  RETURN_IF_ERROR(CheckInputs(inputs));
  return Write({.inputs = inputs,
                .implementation = Sha256Of(Implementation().dump(-1, ' ', /*ensure_ascii=*/true))});
}

absl::StatusOr<Identity> ParseIdentity(absl::string_view document) {
  if (document.size() > kIdentityBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("identity: ", document.size(), " bytes are too many"));
  }
  ASSIGN_OR_RETURN(const json value, ParseJson(document, "identity"));
  Fields fields;
  StrictObject top(value, "identity");
  top.Int("schema", kIdentitySchema, kIdentitySchema);
  StrictObject source(top.Object("source"), "identity source");
  StrictObject model(top.Object("model"), "identity model");
  StrictObject representation(top.Object("representation"), "identity representation");
  StrictObject layout(top.Object("layout"), "identity layout");
  StrictObject adaptation(top.Object("adaptation"), "identity adaptation");
  StrictObject producer(top.Object("producer"), "identity producer");
  RETURN_IF_ERROR(top.Finish());

  fields.inputs.source = source.Digest("fingerprint");
  fields.inputs.family = model.Word("family");
  fields.inputs.model_config = model.Digest("config");
  fields.representation_name = representation.Word("name");
  fields.inputs.dtype = representation.Word("dtype");
  fields.inputs.quantization = representation.Word("quantization");
  fields.layout_name = layout.Word("name");
  fields.inputs.layout = layout.Digest("digest");
  fields.inputs.tp_size = static_cast<int>(layout.Int("tp_size", 1, kRanksMax));
  fields.inputs.tp_rank = static_cast<int>(layout.Int("tp_rank", 0, kRanksMax));
  fields.inputs.adaptation = adaptation.Word("kind");
  fields.inputs.adaptation_fingerprint = adaptation.OptionalDigest("fingerprint");
  fields.inputs.producer = producer.Word("id");
  fields.implementation = producer.Digest("implementation");
  fields.manifest_schema = producer.Int("manifest_schema", 1, INT32_MAX);
  fields.restorer_schema = producer.Int("restorer_schema", 1, INT32_MAX);
  for (StrictObject* section :
       {&source, &model, &representation, &layout, &adaptation, &producer}) {
    RETURN_IF_ERROR(section->Finish());
  }
  RETURN_IF_ERROR(CheckInputs(fields.inputs));
  Identity identity = Write(fields);
  if (identity.document != document) {
    return absl::InvalidArgumentError("identity: the bytes are not in canonical form");
  }
  return identity;
}

}  // namespace dlo::hwr
