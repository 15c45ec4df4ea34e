// dlo-worker: started by dlo-serve, one process per device.
#include <malloc.h>

#include <CLI/CLI.hpp>
#include <string>

#include "base/dtype.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "models/video_pipeline.h"
#include "worker/worker.h"

namespace {

struct Flags {
  dlo::WorkerOptions worker;
  std::string model;
  std::string dtype = "BF16";
  std::string device = "cpu";
  int threads = 0;
  int stream_slots = 0;
  std::string log_level = "info";
};

void AddFlags(CLI::App& app, Flags& flags) {
  app.add_option("--link-fd", flags.worker.link_fd, "the link, an inherited descriptor")
      ->required();
  app.add_option("--rank", flags.worker.rank)->required();
  app.add_option("--incarnation", flags.worker.incarnation, "which start of the rank this is")
      ->required();
  app.add_option("--model", flags.model, "folder of a diffusers repository")->required();
  app.add_option("--dtype", flags.dtype, "F32 or BF16");
  app.add_option("--device", flags.device, "cpu or cuda");
  app.add_option("--threads", flags.threads, "torch threads; 0: as many as there are cores");
  app.add_option("--stream-slots", flags.stream_slots,
                 "device slots that blocks are streamed through; 0: blocks are resident");
  app.add_option("--log-level", flags.log_level);
  // For tests alone, so no part of the help.
  app.add_option("--failpoints", flags.worker.failpoints)->group("");
}

absl::StatusOr<std::unique_ptr<dlo::VideoPipeline>> Load(const Flags& flags) {
  ASSIGN_OR_RETURN(const dlo::DType dtype, dlo::ParseDType(flags.dtype));
  return dlo::LoadVideoPipeline({.root = flags.model,
                                 .dtype = dtype,
                                 .device = flags.device,
                                 .threads = flags.threads,
                                 .stream_slots = flags.stream_slots});
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("dlo-worker runs one rank of a model. dlo-serve starts it; it is of no use alone.");
  Flags flags;
  AddFlags(app, flags);
  CLI11_PARSE(app, argc, argv);
  // Tensors of a video come and go; giving each back to the kernel costs a page fault per page when
  // it comes again.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
  dlo::StartLogging("dlo-worker " + std::to_string(flags.worker.rank), flags.log_level);
  return dlo::RunWorker(flags.worker, [&flags] { return Load(flags); });
}
