// dlo-weights: looks after stores of host weights. Torch-free.
//
//   return dlo::RunWeightsTool(argc, argv, std::cout, std::cerr);
//
// One thread. What was asked for goes to `out`, what went wrong to `err`.
#pragma once

#include <iosfwd>

namespace dlo {

// 0: done; 1: it could not be done, `err` says why; 2: wrong command line.
int RunWeightsTool(int argc, const char* const* argv, std::ostream& out, std::ostream& err);

}  // namespace dlo
