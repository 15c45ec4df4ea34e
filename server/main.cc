// dlo-serve.
#include <stdlib.h>
#include <unistd.h>

#include <iostream>

#include "base/config.h"
#include "server/serve.h"
#include "server/serve_config.h"

int main(int argc, char** argv) {
  // gRPC's own log lines would stand between ours; what they say comes back as an error of ours.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  const dlo::InstallLayout layout = dlo::InstallLayout::OfThisProcess();
  const absl::StatusOr<dlo::ServeCommand> command =
      dlo::ParseServeCommand(argc, argv, dlo::EnvironmentOf(environ), layout);
  if (!command.ok()) {
    std::cerr << "dlo-serve: " << command.status().message() << '\n';
    return 2;
  }
  switch (command->action) {
    case dlo::ServeCommand::Action::kPrint:
      std::cout << command->text;
      return 0;
    case dlo::ServeCommand::Action::kCheck: {
      const absl::Status status = dlo::CheckServeConfig(command->config, std::cout);
      if (status.ok()) return 0;
      std::cerr << "dlo-serve: " << status.message() << '\n';
      return 1;
    }
    case dlo::ServeCommand::Action::kServe:
      return dlo::Serve(command->config, layout);
  }
}
