// What dlo-serve is told by its command line, environment and configuration file.
//
//   ASSIGN_OR_RETURN(ServeCommand command,
//                    ParseServeCommand(argc, argv, EnvironmentOf(environ),
//                                      InstallLayout::OfThisProcess()));
//   if (command.action == ServeCommand::Action::kPrint) std::cout << command.text;
//   if (command.action == ServeCommand::Action::kCheck) {
//     return CheckServeConfig(command.config, std::cout);
//   }
//   Serve(command.config);
//
// Command lines: `dlo-serve [serve] [--config FILE] [flags]`, `dlo-serve check [--config FILE]
// [flags]`, each with --print-config, --help or --version. Every key of the file has a flag and an
// environment variable; see base/config.h. The offloading flags of the reference system are taken,
// too (reference_flags.h). Without a model.path the demo model is served.
//
// Errors are INVALID_ARGUMENT, one line for each thing that is wrong, and name key, value and way
// out.
#pragma once

#include <filesystem>
#include <iosfwd>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/dtype.h"
#include "base/quantization.h"
#include "base/topology.h"
#include "loader/host_weight_plan.h"
#include "loader/hwr/outcome.h"
#include "proto/link_channel.h"
#include "server/compatibility_key.h"

namespace dlo {

struct ServeConfig {
  struct Model {
    std::string path;           // a folder, or a Hugging Face id; see loader/model_path.h
    DType dtype = DType::kF32;  // kF32 or kBF16; the VAE runs in float32
    OnlineQuantization quantization = OnlineQuantization::kNone;  // of the transformers' blocks
  };
  // Degrees of parallelism; all but dp are 1 in this version.
  struct Parallel {
    int dp = 1;
    int sp = 1;
    int tp = 1;
    int cfg = 1;
  };
  struct Offload {
    WeightTransfer transfer = WeightTransfer::kNone;
    int resident_layers = 0;  // or kResidentLayersAuto
    int slots = 2;
    int64_t device_memory_limit_bytes = 0;  // for kResidentLayersAuto
    int64_t host_memory_limit_bytes = 0;    // of the streamed blocks on a host; 0: none
  };

  struct HostWeights {
    CheckpointMmap checkpoint_mmap = CheckpointMmap::kAuto;
    hwr::Mode mode = hwr::Mode::kDisabled;
    std::filesystem::path root;  // absolute; empty: none
    hwr::Validation validation = hwr::Validation::kMetadata;
    int64_t max_store_bytes = 0;  // 0: as the store has it
    int64_t min_free_bytes = 0;
    absl::Duration wait = absl::Minutes(10);
  };

  Model model;
  std::string device = "cpu";              // "cpu" or "cuda"
  std::string listen = "127.0.0.1:50051";  // gRPC: HOST:PORT (port 0: any free one) or unix:/PATH
  std::string metrics_listen;              // HOST:PORT (port 0: any free one); empty: none served
  std::filesystem::path data_dir;          // absolute; jobs and their results; see job_store.h
  Parallel parallel;
  Offload offload;
  HostWeights host_weights;
  // Requests that run together where replicas share their weights; without that a wave is a
  // request.
  struct Wave {
    absl::Duration max_wait = absl::Milliseconds(500);  // of the first one for others
    WaveCompatibility compatibility = WaveCompatibility::kStrict;
    absl::Duration stall_timeout = absl::Minutes(10);  // without progress, until its restart
    int stuck_factor = 50;                             // see visit_watch.h
    absl::Duration stuck_floor = absl::Minutes(1);
  };
  Wave wave;
  int queue_max_waiting = 64;  // jobs that wait; beyond it a client gets RESOURCE_EXHAUSTED
  absl::Duration jobs_result_ttl = absl::Hours(24);   // from a job's end to its removal
  int64_t jobs_result_bytes_max = int64_t{10} << 30;  // of all results and records together
  absl::Duration shutdown_grace = absl::Minutes(5);   // for running requests after SIGTERM
  int worker_threads = 0;  // torch threads of a worker; 0: the cores divided by the workers
  // The last ranks, so many, have their workers on other hosts.
  struct Remote {
    int ranks = 0;
    std::string listen;  // HOST:PORT
    LinkTlsFiles tls;
  };
  Remote remote;
  std::string log_level = "info";
  std::vector<std::string> notices;  // of settings that do nothing, for people
};

// Where the files that come with the program lie.
struct InstallLayout {
  std::filesystem::path executable_dir;
  std::filesystem::path source_dir;  // of the build tree; empty: none

  // Of the running executable and the tree it was built from.
  static InstallLayout OfThisProcess();

  // The demo model: ../share/dlo/shapes beside the executable, or assets/shapes of the source tree.
  // NOT_FOUND names both.
  absl::StatusOr<std::filesystem::path> DemoModel() const;
};

struct ServeCommand {
  enum class Action { kServe, kCheck, kPrint };
  Action action = Action::kServe;
  ServeConfig config;  // kServe, kCheck
  std::string text;    // kPrint: what to write to standard output before exiting with 0
};

absl::StatusOr<ServeCommand> ParseServeCommand(
    int argc, const char* const* argv, const std::map<std::string, std::string>& environment,
    const InstallLayout& layout);

// Checks what `config` names without loading any weights: the model repository's configurations,
// its tokenizer, and the headers of every weight file against the tensors that the model needs;
// with a store of host weights in use also whether it has the model's artifact, for which files
// whose digests are not known yet are read. Tells `out` what it looked at. The first error ends it.
absl::Status CheckServeConfig(const ServeConfig& config, std::ostream& out);

}  // namespace dlo
