// dlo-worker: one process per device. dlo-serve starts those of its own host; on other hosts they
// are started with --connect.
#include <malloc.h>
#include <stdlib.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/flight_recorder.h"
#include "base/log.h"
#include "base/quantization.h"
#include "base/status_macros.h"
#include "base/topology.h"
#include "models/video_pipeline.h"
#include "proto/build_id.h"
#include "runtime/device.h"
#include "worker/rank_group.h"
#include "worker/worker.h"
#include "worker/worker_flags.h"

namespace {

struct Flags {
  dlo::WorkerFlags worker;
  std::string model;
  std::string dtype = "BF16";
  std::string quantization = "none";
  std::string device = "cpu";
  int threads = 0;
  dlo::RankGroupOptions group;
  std::string transfer = "none";
  int collective_timeout_s = 600;
  int slots = 2;
  int resident_layers = 0;
  int64_t device_memory_limit = 0;
  std::string checkpoint_mmap = "auto";
  std::string host_weights_mode = "disabled";
  std::string host_weights_validation = "metadata";
  dlo::HostWeightStoreOptions host_weights;
  int64_t host_weights_wait_s = 600;
  int64_t host_memory_limit = 0;
  std::string log_level = "info";
  std::string print_recorder;
};

void AddFlags(CLI::App& app, Flags& flags) {
  flags.worker.AddTo(app);
  app.add_option("--model", flags.model, "folder of a diffusers repository");
  app.add_option("--dtype", flags.dtype, "F32 or BF16");
  app.add_option("--quantization", flags.quantization,
                 "of the transformers' linear layers, while they are loaded")
      ->check(CLI::IsMember({"none", "fp8"}));
  app.add_option("--device", flags.device, "cpu or cuda");
  app.add_option("--threads", flags.threads, "torch threads; 0: as many as there are cores");
  app.add_option("--dp", flags.group.parallel.dp, "replicas of the whole group");
  app.add_option("--transfer", flags.transfer, "how blocks reach the device")
      ->check(CLI::IsMember({"none", "allgather", "rank-local"}));
  app.add_option("--slots", flags.slots, "device slots that blocks are streamed through");
  app.add_option("--resident-layers", flags.resident_layers,
                 "leading blocks that stay on the device; -1: as many as fit");
  app.add_option("--device-memory-limit", flags.device_memory_limit,
                 "bytes of device memory that resident layers are fitted to");
  app.add_option("--checkpoint-mmap", flags.checkpoint_mmap,
                 "whether blocks that are streamed whole stay in the checkpoint's pages")
      ->check(CLI::IsMember({"auto", "on", "off"}));
  app.add_option("--host-memory-limit", flags.host_memory_limit,
                 "bytes that the streamed blocks of all ranks on this host may take; 0: no limit");
  app.add_option("--host-weights-mode", flags.host_weights_mode,
                 "whether weights come from the store of weights in their final layout")
      ->check(CLI::IsMember({"disabled", "preferred", "required"}));
  app.add_option("--host-weights-root", flags.host_weights.root, "its folder on this host");
  app.add_option("--host-weights-validation", flags.host_weights_validation,
                 "how much of an artifact is looked at before it is used")
      ->check(CLI::IsMember({"metadata", "full"}));
  app.add_option("--host-weights-max-store-bytes", flags.host_weights.max_store_bytes,
                 "of all files of the store; 0: what the store says");
  app.add_option("--host-weights-min-free-bytes", flags.host_weights.min_free_bytes,
                 "that stay free on its filesystem; 0: what the store says");
  app.add_option("--host-weights-wait-s", flags.host_weights_wait_s,
                 "seconds for which locks of other processes are waited for");
  app.add_flag("--model-from-hub", flags.host_weights.from_hub,
               "--model is a snapshot in the Hugging Face cache");
  app.add_option("--rendezvous-fd", flags.group.rendezvous_fd,
                 "an inherited listening socket on which this rank serves the others' meeting");
  app.add_option("--rendezvous", flags.group.rendezvous, "IP:PORT where another rank does");
  app.add_option("--collective-timeout-s", flags.collective_timeout_s,
                 "seconds after which a collective has failed");
  app.add_option("--log-level", flags.log_level);
  app.add_option("--print-recorder", flags.print_recorder,
                 "print what a flight recorder's file holds, and exit");
}

// By their rank in the group.
std::vector<int> WeightRanks(const dlo::RankGroupOptions& group) {
  const auto topology = dlo::Topology::Create(group.parallel);
  if (!topology.ok()) return {};
  const std::optional<dlo::GroupKind> kind = topology->WeightGroup(group.transfer);
  std::vector<int> ranks;
  if (!kind) return ranks;
  for (dlo::Rank rank : topology->Group(*kind, dlo::Rank{group.rank})) ranks.push_back(rank.value);
  return ranks;
}

absl::StatusOr<dlo::LoadedPipeline> Load(Flags& flags, dlo::FlightRecorder* recorder,
                                         dlo::StartupReport* report) {
  if (flags.model.empty()) return absl::InvalidArgumentError("--model is missing");
  ASSIGN_OR_RETURN(const dlo::DType dtype, dlo::ParseDType(flags.dtype));
  dlo::PipelineOptions options = {.root = flags.model,
                                  .dtype = dtype,
                                  .device = flags.device,
                                  .threads = flags.threads,
                                  .resident_layers = flags.resident_layers,
                                  .device_memory_limit_bytes = flags.device_memory_limit,
                                  .host_memory_limit_bytes = flags.host_memory_limit,
                                  .processes_on_host = flags.group.parallel.dp,
                                  .host_weights = flags.host_weights,
                                  .report = report,
                                  .rank = flags.worker.options.rank,
                                  .recorder = recorder};
  dlo::RankGroupOptions& group = flags.group;
  group.rank = flags.worker.options.rank;
  group.recorder = recorder;
  ASSIGN_OR_RETURN(group.device, dlo::ParseDeviceKind(flags.device));
  ASSIGN_OR_RETURN(group.transfer, dlo::ParseWeightTransfer(flags.transfer));
  if (group.transfer != dlo::WeightTransfer::kNone) options.stream_slots = flags.slots;
  ASSIGN_OR_RETURN(options.checkpoint_mmap, dlo::ParseCheckpointMmap(flags.checkpoint_mmap));
  ASSIGN_OR_RETURN(options.quantization, dlo::ParseOnlineQuantization(flags.quantization));
  ASSIGN_OR_RETURN(options.host_weights.mode, dlo::hwr::ParseMode(flags.host_weights_mode));
  ASSIGN_OR_RETURN(options.host_weights.validation,
                   dlo::hwr::ParseValidation(flags.host_weights_validation));
  options.host_weights.wait = absl::Seconds(flags.host_weights_wait_s);
  group.timeouts.operation = absl::Seconds(flags.collective_timeout_s);
  ASSIGN_OR_RETURN(dlo::RankCommunicators groups, dlo::JoinRankGroups(group));
  options.weight_group = std::move(groups.weights);
  options.agreement = {{"build", dlo::BuildId()}};
  ASSIGN_OR_RETURN(std::unique_ptr<dlo::VideoPipeline> pipeline, dlo::LoadVideoPipeline(options));
  return dlo::LoadedPipeline{std::move(pipeline), WeightRanks(group)};
}

int PrintRecorder(const std::string& path) {
  const absl::StatusOr<dlo::FlightLog> log = dlo::ReadFlightFile(path);
  if (!log.ok()) {
    std::cerr << "dlo-worker: " << log.status().message() << '\n';
    return 1;
  }
  std::cout << dlo::FlightLogText(*log, dlo::kFlightRecordsMax);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  // gRPC's own log lines would stand between ours; what they say comes back as an error of ours.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  CLI::App app(
      "dlo-worker runs one rank of a model. dlo-serve starts those of its own host; on another "
      "host: dlo-worker --connect HOST:PORT --rank R --tls-ca FILE --tls-cert FILE --tls-key FILE. "
      "What is not given here comes from dlo-serve.");
  app.set_version_flag("--version", "dlo-worker " + std::string(dlo::BuildId()));
  Flags flags;
  AddFlags(app, flags);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (!flags.print_recorder.empty()) return PrintRecorder(flags.print_recorder);
  if (const absl::Status status = flags.worker.Finish(app, argc, argv); !status.ok()) {
    std::cerr << "dlo-worker: " << status.message() << '\n';
    return 2;
  }
  // Tensors of a video come and go; giving each back to the kernel costs a page fault per page when
  // it comes again.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
  dlo::StartLogging("dlo-worker " + std::to_string(flags.worker.options.rank), flags.log_level);
  return dlo::RunWorker(flags.worker.options,
                        [&flags](dlo::FlightRecorder* recorder, dlo::StartupReport* report) {
                          return Load(flags, recorder, report);
                        });
}
