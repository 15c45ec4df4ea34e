// The command `dlo-client generate`: one request, its progress, its file.
#pragma once

#include <filesystem>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/console.h"
#include "dlo/v1/video_generation.pb.h"

namespace dlo {

struct GenerateOptions {
  std::string endpoint;
  // prompt, negative_prompt and settings; output_format follows from `output`.
  dlo::v1::GenerateRequest request;
  std::filesystem::path output;         // .mp4, .png or .safetensors
  std::filesystem::path contact_sheet;  // .png, made from the MP4 received; empty: none
  std::filesystem::path timeline;       // Chrome trace JSON of the request; empty: none
  absl::Duration timeout = absl::InfiniteDuration();  // for the whole request
  bool quiet = false;
};

// Returns when the files are in place under their names, after printing their paths to console.out.
// Errors are one line each, ready to be shown; no part of a file is left behind. An interrupt
// cancels the request on the server: CANCELLED.
absl::Status Generate(const GenerateOptions& options, const Console& console, Interrupt& interrupt);

}  // namespace dlo
