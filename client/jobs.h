// The commands `dlo-client submit|get|list|watch|download|cancel|delete`: jobs that outlive the
// call.
//
// Each prints its result to console.out, progress and errors to console.err. Errors are one line
// each, ready to be shown. An interrupt ends the call, never the job: CANCELLED.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/console.h"
#include "client/output_file.h"
#include "dlo/v1/video_generation.pb.h"

namespace dlo {

struct SubmitOptions {
  std::string endpoint;
  v1::GenerateRequest request;
};

struct JobOptions {
  std::string endpoint;
  std::string id;
  bool quiet = false;              // watch, download
  std::filesystem::path output;    // download: .mp4, .png or .safetensors, as the job was asked for
  std::filesystem::path timeline;  // download: Chrome trace JSON, too; empty: none
};

struct ListOptions {
  std::string endpoint;
  std::vector<v1::JobState> states;  // empty: all
  int limit = 50;                    // jobs at most; 0: all
};

// Prints the job's id; with validate_only the resolved settings and the forecast.
absl::Status SubmitJob(const SubmitOptions& options, const Console& console, Interrupt& interrupt);

absl::Status GetJob(const JobOptions& options, const Console& console, Interrupt& interrupt);

// A line for each job, the newest first.
absl::Status ListJobs(const ListOptions& options, const Console& console, Interrupt& interrupt);

// Follows the job to its end. OK exactly if it succeeds; else with the code of its failure.
absl::Status WatchJob(const JobOptions& options, const Console& console, Interrupt& interrupt);

// Returns when the file is in place under its name, after printing its path. A download that breaks
// off goes on where it was, also in another process: what it received is kept in a hidden file
// beside the output, whose name the error tells.
absl::Status DownloadResult(const JobOptions& options, const Console& console,
                            Interrupt& interrupt);

// Puts the timeline of a job that was submitted with `trace` in place. An interrupt: CANCELLED.
absl::Status FetchTimeline(const std::string& endpoint, const std::string& id, Interrupt& interrupt,
                           OutputFile& file);

// Prints the job's state.
absl::Status CancelJob(const JobOptions& options, const Console& console, Interrupt& interrupt);

absl::Status DeleteJob(const JobOptions& options, const Console& console, Interrupt& interrupt);

}  // namespace dlo
