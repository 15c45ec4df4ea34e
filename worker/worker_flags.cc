#include "worker/worker_flags.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace dlo {

void WorkerFlags::AddTo(CLI::App& app) {
  app.option_defaults()->take_last();
  app.add_option("--link-fd", options.link_fd, "the link, an inherited descriptor");
  app.add_option("--connect", options.connect,
                 "HOST:PORT of a dlo-serve on another host (its worker.listen)");
  app.add_option("--tls-ca", options.tls.ca, "PEM: who may sign the certificate of dlo-serve");
  app.add_option("--tls-cert", options.tls.cert, "PEM: this worker's certificate");
  app.add_option("--tls-key", options.tls.key, "PEM: its private key");
  app.add_option("--rank", options.rank);
  // CLI11 takes -1 for 2^64 - 1.
  app.add_option("--incarnation", options.incarnation,
                 "which start of the rank this is; given by dlo-serve")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--recorder-fd", options.recorder_fd,
                 "the flight recorder's memory, an inherited descriptor");
  app.add_option("--recorder", options.recorder_file,
                 "file of the flight recorder, for a worker on another host");
  // For tests alone, so no part of the help.
  app.add_option("--failpoints", options.failpoints)->group("");
}

absl::Status WorkerFlags::Finish(CLI::App& app, int argc, const char* const* argv) {
  if ((options.link_fd < 0) == options.connect.empty()) {
    return absl::InvalidArgumentError(
        "give --connect HOST:PORT to attach to a dlo-serve on another host; the workers of its own "
        "host dlo-serve starts itself, with --link-fd");
  }
  if (app.count("--rank") == 0) {
    return absl::InvalidArgumentError("--rank is missing: which rank this worker is");
  }
  if (options.connect.empty()) return absl::OkStatus();
  for (const auto& [flag, value] : {std::pair{"--tls-ca", &options.tls.ca},
                                    {"--tls-cert", &options.tls.cert},
                                    {"--tls-key", &options.tls.key}}) {
    if (value->empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag, " is missing: --connect needs --tls-ca, --tls-cert and --tls-key"));
    }
  }
  options.on_welcome = [&app, argc, argv](const v1::Welcome& welcome) -> absl::Status {
    std::vector<const char*> all = {argv[0]};
    for (const std::string& argument : welcome.arguments()) all.push_back(argument.c_str());
    all.insert(all.end(), argv + 1, argv + argc);
    try {
      app.parse(static_cast<int>(all.size()), all.data());
    } catch (const CLI::ParseError& error) {
      return absl::InvalidArgumentError(
          absl::StrCat("the flags that dlo-serve sends are wrong here: ", error.what()));
    }
    return absl::OkStatus();
  };
  return absl::OkStatus();
}

}  // namespace dlo
