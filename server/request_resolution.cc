#include "server/request_resolution.h"

#include <algorithm>
#include <array>
#include <random>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/convert.h"

namespace dlo {
namespace {

constexpr size_t kRequestIdBytesMax = 128;

uint64_t Random64() {
  // Its making asks the processor what it can, which is slow in a virtual machine.
  static thread_local std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

bool IsRequestIdChar(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
}

void CheckRequestId(const std::string& id, std::vector<FieldViolation>* wrong) {
  if (id.size() > kRequestIdBytesMax) {
    wrong->push_back({"request_id", absl::StrCat("has ", id.size(), " characters; at most ",
                                                 kRequestIdBytesMax, " are allowed")});
  } else if (!std::all_of(id.begin(), id.end(), IsRequestIdChar)) {
    wrong->push_back({"request_id", absl::StrCat("\"", id,
                                                 "\" holds a character outside "
                                                 "[A-Za-z0-9._-]; leave it empty to get a UUID")});
  }
}

v1::OutputFormat ResolveOutputFormat(v1::OutputFormat format, std::vector<FieldViolation>* wrong) {
  switch (format) {
    case v1::OUTPUT_FORMAT_UNSPECIFIED:
      return v1::OUTPUT_FORMAT_MP4;
    case v1::OUTPUT_FORMAT_MP4:
    case v1::OUTPUT_FORMAT_PNG_SHEET:
    case v1::OUTPUT_FORMAT_SAFETENSORS:
      return format;
    default:
      wrong->push_back(
          {"output_format",
           absl::StrCat(static_cast<int>(format),
                        " is not a format; use OUTPUT_FORMAT_MP4 (1), "
                        "OUTPUT_FORMAT_PNG_SHEET (2) or OUTPUT_FORMAT_SAFETENSORS (3)")});
      return v1::OUTPUT_FORMAT_MP4;
  }
}

}  // namespace

std::string RandomUuid() {
  const uint64_t high = (Random64() & ~uint64_t{0xF000}) | 0x4000;
  const uint64_t low = (Random64() >> 2) | (uint64_t{1} << 63);
  return absl::StrFormat("%08x-%04x-%04x-%04x-%012x", high >> 32, (high >> 16) & 0xFFFF,
                         high & 0xFFFF, low >> 48, low & 0xFFFFFFFFFFFF);
}

std::vector<FieldViolation> ResolveRequest(const ModelCard& card,
                                           const v1::GenerateRequest& request, JobSpec* spec) {
  std::vector<FieldViolation> wrong;
  CheckRequestId(request.request_id(), &wrong);
  spec->id = request.request_id().empty() ? RandomUuid() : request.request_id();
  spec->id_is_random = request.request_id().empty();
  spec->prompt = request.prompt();
  spec->negative_prompt = request.negative_prompt();
  for (FieldViolation& violation : card.CheckPrompts(spec->prompt, spec->negative_prompt)) {
    wrong.push_back(std::move(violation));
  }
  for (FieldViolation& violation :
       card.Resolve(RequestedFromProto(request.settings()), Random64(), &spec->settings)) {
    wrong.push_back(std::move(violation));
  }
  spec->output_format = ResolveOutputFormat(request.output_format(), &wrong);
  spec->trace = request.trace();
  for (const auto& [key, value] : request.extra().fields()) {
    wrong.push_back({absl::StrCat("extra.", key),
                     absl::StrCat("model \"", card.name(), "\" has no such parameter")});
  }
  return wrong;
}

}  // namespace dlo
