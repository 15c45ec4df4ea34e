// The offloading flags of the reference system, next to dlo-serve's own.
//
//   ReferenceFlags reference;
//   reference.AddTo(app);
//   app.parse(argc, argv);
//   ASSIGN_OR_RETURN(MappedFlags mapped, reference.Map(own_flags));
//   for (const std::string& notice : reference.Notices(/*streams=*/true)) ...
//
// A value that outlives the parse.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"

namespace dlo {

class ReferenceFlags {
 public:
  struct MappedFlags {
    std::map<std::string, std::string> values;      // own flag -> text
    std::map<std::string, std::string> as_written;  // own flag -> what the command line says
  };

  ReferenceFlags() = default;
  ReferenceFlags(const ReferenceFlags&) = delete;
  ReferenceFlags& operator=(const ReferenceFlags&) = delete;

  void AddTo(CLI::App& app);

  // For suggestions.
  static std::vector<std::string> Names();

  // In terms of the own flags. `own` are the own flags that were given:
  // INVALID_ARGUMENT names both where they say something else, and a flag that does nothing alone.
  absl::StatusOr<MappedFlags> Map(const std::map<std::string, std::string>& own) const;

  // A line for each flag of an older offloader that was given. `streams`: blocks are streamed.
  std::vector<std::string> Notices(bool streams) const;

 private:
  bool distributed_ = false;
  bool use_allgather_ = false;
  bool no_use_allgather_ = false;
  // Empty: not given.
  std::string resident_layers_;
  std::string runtime_mode_;
  std::string runtime_root_;
  bool cpu_offload_ = false;
  bool layerwise_offload_ = false;
};

}  // namespace dlo
