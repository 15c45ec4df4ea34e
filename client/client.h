// The command line of dlo-client, without the process around it.
#pragma once

#include "client/console.h"

namespace dlo {

// Exit codes: 0 done, 1 failed (one line on console.err), 2 wrong command line (the same), 128 +
// signal when interrupted.
int RunClient(int argc, const char* const* argv, const Console& console, Interrupt& interrupt);

}  // namespace dlo
