#include "client/client.h"

#include <CLI/CLI.hpp>

#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/generate.h"
#include "client/rpc.h"
#include "client/serving_status.h"

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

void AddGenerate(CLI::App* command, GenerateOptions* options) {
  v1::GenerateRequest* request = &options->request;
  v1::VideoSettings* settings = request->mutable_settings();
  command->add_option("--endpoint", options->endpoint, "HOST:PORT or unix:PATH")
      ->capture_default_str();
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
  command
      ->add_option(
          "-o,--output", options->output,
          "File to write: .mp4 (video), .png (contact sheet) or .safetensors (lossless frames)")
      ->required();
  command->add_option("--contact-sheet", options->contact_sheet,
                      "Also a .png contact sheet of the .mp4");
  AddDuration(command, "--timeout", &options->timeout, "Gives up after this long");
  command->add_flag("-q,--quiet", options->quiet, "Prints errors only");
}

void AddStatus(CLI::App* command, StatusOptions* options) {
  command->add_option("--endpoint", options->endpoint, "HOST:PORT or unix:PATH")
      ->capture_default_str();
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
  app.require_subcommand(1);
  GenerateOptions generate{.endpoint = kDefaultEndpoint};
  StatusOptions status{.endpoint = kDefaultEndpoint};
  CLI::App* generate_command = app.add_subcommand("generate", "Makes a video from a prompt");
  CLI::App* status_command = app.add_subcommand("status", "Prints SERVING or NOT_SERVING");
  AddGenerate(generate_command, &generate);
  AddStatus(status_command, &status);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return ReportCommandLine(app, error, console);
  }
  if (status_command->parsed()) {
    return Report(CheckServing(status, console, interrupt), console, interrupt);
  }
  if (generate.request.prompt() == "-") {
    std::string prompt((std::istreambuf_iterator<char>(*console.in)),
                       std::istreambuf_iterator<char>());
    generate.request.set_prompt(std::string(absl::StripTrailingAsciiWhitespace(prompt)));
  }
  return Report(Generate(generate, console, interrupt), console, interrupt);
}

}  // namespace dlo
