// dlo-worker with a scripted pipeline, for process tests that need no model. What its start does
// comes on the command line:
//   --load-error=TEXT   the model cannot be loaded
//   --load-signal=N     dies while loading
//   --load-hold=PATH    loads until PATH exists
//   --build-id=TEXT     pretends to be of another build
#include <signal.h>

#include <CLI/CLI.hpp>
#include <filesystem>

#include "absl/time/clock.h"
#include "server/testing/scripted_pipeline.h"
#include "worker/worker.h"

int main(int argc, char** argv) {
  CLI::App app;
  dlo::WorkerOptions options;
  std::string load_error;
  std::string load_hold;
  int load_signal = 0;
  app.allow_extras();
  app.add_option("--link-fd", options.link_fd);
  app.add_option("--rank", options.rank);
  app.add_option("--incarnation", options.incarnation);
  app.add_option("--build-id", options.build_id);
  app.add_option("--load-error", load_error);
  app.add_option("--load-signal", load_signal);
  app.add_option("--load-hold", load_hold);
  CLI11_PARSE(app, argc, argv);
  return dlo::RunWorker(options, [&]() -> absl::StatusOr<std::unique_ptr<dlo::VideoPipeline>> {
    if (load_signal != 0) raise(load_signal);
    while (!load_hold.empty() && !std::filesystem::exists(load_hold)) {
      absl::SleepFor(absl::Milliseconds(2));
    }
    if (!load_error.empty()) return absl::NotFoundError(load_error);
    return dlo::NewScriptedPipeline();
  });
}
