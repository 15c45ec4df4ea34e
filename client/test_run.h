// A command line of dlo-client, run in the test's own process.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "client/client.h"
#include "client/console.h"

namespace dlo {

struct Ran {
  int code = -1;
  std::string out;
  std::string err;
};

// `args` without the program's name; `input` is standard input.
inline Ran RunClientWith(const std::vector<std::string>& args, const std::string& input,
                         Interrupt& interrupt) {
  std::vector<const char*> argv = {"dlo-client"};
  for (const std::string& arg : args) argv.push_back(arg.c_str());
  std::istringstream in(input);
  std::ostringstream out, err;
  const Console console{.in = &in, .out = &out, .err = &err};
  Ran ran;
  ran.code = RunClient(static_cast<int>(argv.size()), argv.data(), console, interrupt);
  ran.out = out.str();
  ran.err = err.str();
  return ran;
}

}  // namespace dlo
