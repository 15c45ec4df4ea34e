// dlo-weights.
#include <iostream>

#include "base/log.h"
#include "weights/weights_tool.h"

int main(int argc, char** argv) {
  dlo::StartLogging("dlo-weights", "warn");
  return dlo::RunWeightsTool(argc, argv, std::cout, std::cerr);
}
