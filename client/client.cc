#include "client/client.h"

#include <CLI/CLI.hpp>

#include <functional>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/generate.h"
#include "client/job_text.h"
#include "client/jobs.h"
#include "client/output_file.h"
#include "client/rpc.h"
#include "client/serving_status.h"
#include "proto/build_id.h"

namespace dlo {
namespace {

constexpr int kFailed = 1;
constexpr int kWrongCommandLine = 2;

// A duration with a unit, e.g. "90s", "10m", "1h30m".
CLI::Option* AddDuration(CLI::App* command, const char* flag, absl::Duration* value,
                         const std::string& help) {
  return command
      ->add_option_function<std::string>(
          flag,
          [flag, value](const std::string& text) {
            absl::Duration parsed;
            if (!absl::ParseDuration(text, &parsed) || parsed <= absl::ZeroDuration()) {
              throw CLI::ValidationError(
                  flag, absl::StrCat(
                            "needs a duration above zero with a unit such as 90s, 10m or 1h, got ",
                            text));
            }
            *value = parsed;
          },
          help)
      ->type_name("DURATION");
}

template <typename T, typename Setter>
void AddSetting(CLI::App* command, const std::string& flag, const std::string& help,
                Setter setter) {
  command->add_option_function<T>(flag, setter, help);
}

void AddEndpoint(CLI::App* command, std::string* endpoint) {
  command->add_option("--endpoint", *endpoint, "HOST:PORT or unix:PATH")->capture_default_str();
}

void AddQuiet(CLI::App* command, bool* quiet) {
  command->add_flag("-q,--quiet", *quiet, "Prints errors only");
}

// All of the request but its output format.
void AddRequest(CLI::App* command, v1::GenerateRequest* request) {
  v1::VideoSettings* settings = request->mutable_settings();
  AddSetting<std::string>(command, "--request-id",
                          "Id of the job; sent again, it gives the same job. Empty: a new one",
                          [request](const std::string& id) { request->set_request_id(id); });
  command
      ->add_option_function<std::string>(
          "--prompt", [request](const std::string& text) { request->set_prompt(text); },
          "What the video shows; - reads it from standard input")
      ->required();
  AddSetting<std::string>(
      command, "--negative-prompt", "What it must not show",
      [request](const std::string& text) { request->set_negative_prompt(text); });
  AddSetting<int>(command, "--steps", "Denoising steps",
                  [settings](int n) { settings->set_num_inference_steps(n); });
  AddSetting<int>(command, "--width", "Pixels, a multiple of 16",
                  [settings](int n) { settings->set_width(n); });
  AddSetting<int>(command, "--height", "Pixels, a multiple of 16",
                  [settings](int n) { settings->set_height(n); });
  AddSetting<int>(command, "--frames", "Frames of the video",
                  [settings](int n) { settings->set_num_frames(n); });
  AddSetting<double>(command, "--fps", "Frames per second of playback",
                     [settings](double x) { settings->set_fps(x); });
  AddSetting<double>(command, "--guidance-scale", "1 or less: no guidance",
                     [settings](double x) { settings->set_guidance_scale(x); });
  AddSetting<double>(command, "--guidance-scale-2", "The same for the low-noise expert",
                     [settings](double x) { settings->set_guidance_scale_2(x); });
  AddSetting<double>(command, "--flow-shift", "Shift of the noise schedule",
                     [settings](double x) { settings->set_flow_shift(x); });
  AddSetting<std::string>(command, "--solver", "unipc, unipc-legacy, euler or euler-native",
                          [settings](const std::string& name) { settings->set_solver(name); });
  command
      ->add_option_function<std::string>(
          "--seed",
          [settings](const std::string& text) {
            // CLI11 takes -1 for 2^64 - 1.
            uint64_t seed = 0;
            if (!absl::SimpleAtoi(text, &seed)) {
              throw CLI::ValidationError(
                  "--seed", absl::StrCat("must be a whole number from 0 to 2^64 - 1, got ", text));
            }
            settings->set_seed(seed);
          },
          "Same seed, same video")
      ->type_name("UINT");
}

void AddGenerate(CLI::App* command, GenerateOptions* options) {
  AddEndpoint(command, &options->endpoint);
  AddRequest(command, &options->request);
  command
      ->add_option(
          "-o,--output", options->output,
          "File to write: .mp4 (video), .png (contact sheet) or .safetensors (lossless frames)")
      ->required();
  command->add_option("--contact-sheet", options->contact_sheet,
                      "Also a .png contact sheet of the .mp4");
  command->add_option("--trace", options->timeline,
                      "Also a timeline of the request, JSON for ui.perfetto.dev");
  AddDuration(command, "--timeout", &options->timeout, "Gives up after this long");
  AddQuiet(command, &options->quiet);
}

void AddSubmit(CLI::App* command, SubmitOptions* options) {
  AddEndpoint(command, &options->endpoint);
  AddRequest(command, &options->request);
  command
      ->add_option_function<std::string>(
          "--format",
          [options](const std::string& name) {
            const absl::StatusOr<VideoFormat> format = FormatOfPath("x." + name);
            if (!format.ok()) {
              throw CLI::ValidationError(
                  "--format", absl::StrCat("must be mp4, png or safetensors, got ", name));
            }
            options->request.set_output_format(ToProto(*format));
          },
          "mp4 (video), png (contact sheet) or safetensors (lossless frames) (mp4)")
      ->type_name("NAME");
  command->add_flag_function(
      "--validate-only", [options](int64_t) { options->request.set_validate_only(true); },
      "Only checks the request and prints its settings and a forecast");
  command->add_flag_function(
      "--trace", [options](int64_t) { options->request.set_trace(true); },
      "Records a timeline, for download --trace");
}

void AddJob(CLI::App* command, JobOptions* options) {
  AddEndpoint(command, &options->endpoint);
  command->add_option("id", options->id, "Of the job")->required();
}

void AddList(CLI::App* command, ListOptions* options) {
  AddEndpoint(command, &options->endpoint);
  command
      ->add_option_function<std::vector<std::string>>(
          "--state",
          [options](const std::vector<std::string>& names) {
            for (const std::string& name : names) {
              const std::optional<v1::JobState> state = StateOfName(name);
              if (!state) {
                throw CLI::ValidationError(
                    "--state",
                    absl::StrCat("must be queued, admitted, encoding-text, denoising, decoding, "
                                 "succeeded, failed or cancelled, got ",
                                 name));
              }
              options->states.push_back(*state);
            }
          },
          "Only jobs in this state; may be given several times")
      ->type_name("NAME")
      ->allow_extra_args(false);
  command->add_option("--limit", options->limit, "Jobs at most; 0: all")
      ->check(CLI::Range(0, std::numeric_limits<int>::max()))
      ->capture_default_str();
}

void AddStatus(CLI::App* command, StatusOptions* options) {
  AddEndpoint(command, &options->endpoint);
  AddDuration(command, "--wait", &options->wait, "Waits up to this long for SERVING");
}

int Report(const absl::Status& status, const Console& console, const Interrupt& interrupt) {
  if (status.ok()) return 0;
  *console.err << "dlo-client: " << std::string(status.message()) << std::endl;
  if (absl::IsCancelled(status) && interrupt.signal() != 0) return 128 + interrupt.signal();
  return kFailed;
}

// CLI11's own exit() writes several lines.
int ReportCommandLine(const CLI::App& app, const CLI::ParseError& error, const Console& console) {
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {
    app.exit(error, *console.out, *console.err);  // --help, --version
    return 0;
  }
  *console.err << "dlo-client: " << OneLine(error.what()) << " (see dlo-client --help)"
               << std::endl;
  return kWrongCommandLine;
}

}  // namespace

int RunClient(int argc, const char* const* argv, const Console& console, Interrupt& interrupt) {
  CLI::App app("Talks to dlo-serve over gRPC.", "dlo-client");
  app.set_version_flag("--version", absl::StrCat("dlo-client ", BuildId()));
  app.require_subcommand(1);
  GenerateOptions generate{.endpoint = kDefaultEndpoint};
  SubmitOptions submit{.endpoint = kDefaultEndpoint};
  JobOptions job{.endpoint = kDefaultEndpoint};
  ListOptions list{.endpoint = kDefaultEndpoint};
  StatusOptions status{.endpoint = kDefaultEndpoint};
  std::function<absl::Status()> run;
  const auto add = [&](const char* name, const char* help, auto function, auto* options) {
    CLI::App* const command = app.add_subcommand(name, help);
    command->callback([&, function, options] {
      run = [&, function, options] { return function(*options, console, interrupt); };
    });
    return command;
  };
  AddGenerate(add("generate", "Makes a video from a prompt", Generate, &generate), &generate);
  AddSubmit(add("submit", "Submits a job and prints its id", SubmitJob, &submit), &submit);
  AddJob(add("get", "Prints what is known of a job", GetJob, &job), &job);
  AddList(add("list", "Prints a line for each job, the newest first", ListJobs, &list), &list);
  CLI::App* const watch = add("watch", "Follows a job to its end", WatchJob, &job);
  AddJob(watch, &job);
  AddQuiet(watch, &job.quiet);
  CLI::App* const download = add("download", "Fetches a job's result", DownloadResult, &job);
  AddJob(download, &job);
  AddQuiet(download, &job.quiet);
  download
      ->add_option("-o,--output", job.output,
                   "File to write: .mp4, .png or .safetensors, as the job was asked for")
      ->required();
  download->add_option("--trace", job.timeline,
                       "Also the timeline of a job that was submitted with --trace");
  AddJob(add("cancel", "Cancels a job and prints its state", CancelJob, &job), &job);
  AddJob(add("delete", "Removes a job and its result", DeleteJob, &job), &job);
  AddStatus(add("status", "Prints SERVING or NOT_SERVING, and what each rank is doing",
                CheckServing, &status),
            &status);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return ReportCommandLine(app, error, console);
  }
  for (v1::GenerateRequest* request : {&generate.request, &submit.request}) {
    if (request->prompt() != "-") continue;
    std::string prompt((std::istreambuf_iterator<char>(*console.in)),
                       std::istreambuf_iterator<char>());
    request->set_prompt(std::string(absl::StripTrailingAsciiWhitespace(prompt)));
  }
  return Report(run(), console, interrupt);
}

}  // namespace dlo
