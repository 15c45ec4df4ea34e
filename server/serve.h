// dlo-serve from its configuration to its exit code.
//
//   return Serve(command.config, InstallLayout::OfThisProcess());
//
// Logs "serving on ADDRESS" each time it becomes ready. SIGTERM and SIGINT: refuses new requests,
// finishes what runs within shutdown_grace, returns 0. A second one ends the process at once. When
// the workers cannot be kept alive, says why and returns 1.
//
// Called once, by main, before any thread was started: it blocks both signals for all threads.
#pragma once

#include "server/serve_config.h"

namespace dlo {

int Serve(const ServeConfig& config, const InstallLayout& layout);

}  // namespace dlo
