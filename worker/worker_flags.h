// The flags by which a worker program is told its rank and its way to dlo-serve.
//
//   WorkerFlags flags;
//   flags.AddTo(app);  app.add_option("--model", ...);
//   CLI11_PARSE(app, argc, argv);
//   if (absl::Status status = flags.Finish(app, argc, argv); !status.ok()) ...
//   RunWorker(flags.options, load);
//
// A flag that is given twice has its last value. To a worker on another host Welcome brings the
// flags of the local ones: they are parsed as if they stood before its own.
#pragma once

#include <CLI/CLI.hpp>

#include "absl/status/status.h"
#include "worker/worker.h"

namespace dlo {

struct WorkerFlags {
  WorkerOptions options;

  // Before any other flag is added.
  void AddTo(CLI::App& app);

  // INVALID_ARGUMENT if the flags do not go together. `app` and `argv` outlive the worker.
  absl::Status Finish(CLI::App& app, int argc, const char* const* argv);
};

}  // namespace dlo
