// Our half of two comparisons that bench/compare.py makes, on weights and inputs which the other
// half (bench/reference_worker.py) wrote: one denoising step, and the encoding of a prompt.
//
//   bench_components denoise REPOSITORY INPUTS.safetensors DTYPE THREADS BRANCHES
//   bench_components text REPOSITORY INPUTS.safetensors DTYPE THREADS
//
// After "ready" each line "run" on standard input does the work once and answers its seconds; "save
// FILE" writes the last result, so that both halves can be seen to compute the same. DTYPE is F32
// or BF16.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "loader/checkpoint.h"
#include "loader/safetensors.h"
#include "models/component_weights.h"
#include "models/schedulers/flow_solver.h"
#include "models/umt5/umt5.h"
#include "models/umt5/umt5_specs.h"
#include "models/wan/transformer.h"
#include "models/wan/transformer_specs.h"
#include "models/wan/wan_config.h"
#include "runtime/device.h"

namespace dlo {
namespace {

constexpr int kSteps = 50;  // of the schedule whose steps are timed
constexpr double kGuidance = 5.0;

struct Arguments {
  std::string command;
  std::string repository;
  std::string inputs;
  DType dtype = DType::kF32;
  int threads = 0;
  int branches = 0;
};

// The work to be timed; returns its result.
using Work = std::function<absl::StatusOr<at::Tensor>()>;

absl::StatusOr<at::Tensor> ReadTensor(const SafetensorsFile& file, const std::string& name) {
  const auto found = file.tensors().find(name);
  if (found == file.tensors().end()) {
    return absl::NotFoundError(absl::StrCat(file.path().native(), " holds no tensor ", name));
  }
  const DType dtype = found->second.dtype;
  at::Tensor tensor =
      at::empty(found->second.shape, dtype == DType::kI64 ? at::kLong : TorchDType(dtype));
  std::memcpy(tensor.data_ptr(), file.data(found->second).data(),
              static_cast<size_t>(found->second.bytes));
  return tensor;
}

absl::StatusOr<ComponentWeights> LoadComponent(const std::string& dir,
                                               const std::vector<TensorSpec>& specs,
                                               Device& device) {
  ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(dir));
  return ComponentWeights::Load(checkpoint, specs, device);
}

// A step in the middle of a request: what a request computes once (text keys and values) is there.
// The result is the way that the latents went since the start: the latents themselves are mostly
// the noise that both halves begin with.
class DenoiseStep {
 public:
  static absl::StatusOr<Work> Create(const Arguments& arguments, const WanConfig& config,
                                     Device& device) {
    ASSIGN_OR_RETURN(
        ComponentWeights weights,
        LoadComponent(arguments.repository + "/transformer",
                      WanTransformerSpecs(config.transformer, arguments.dtype), device));
    ASSIGN_OR_RETURN(SafetensorsFile inputs, SafetensorsFile::Open(arguments.inputs));
    auto step = std::make_shared<DenoiseStep>();
    ASSIGN_OR_RETURN(step->start_, ReadTensor(inputs, "latents"));
    step->latents_ = step->start_;
    step->dtype_ = TorchDType(arguments.dtype);
    step->transformer_ = std::make_unique<WanTransformer>(config.transformer, std::move(weights));
    step->solver_ = MakeFlowSolver(config.scheduler, kSteps);
    std::vector<TextEmbedding> branches;
    for (int i = 0; i < arguments.branches; ++i) {
      ASSIGN_OR_RETURN(at::Tensor rows, ReadTensor(inputs, i == 0 ? "text" : "negative_text"));
      branches.push_back({.rows = rows.to(step->dtype_), .num_padding_rows = 512 - rows.size(0)});
    }
    const at::Tensor& x = step->latents_;
    step->context_ = step->transformer_->Prepare({x.size(2), x.size(3), x.size(4)}, branches);
    return Work([step] { return step->Run(); });
  }

 private:
  absl::StatusOr<at::Tensor> Run() {
    const float timestep = solver_->schedule().timesteps.at(step_++);
    ASSIGN_OR_RETURN(at::Tensor v,
                     transformer_->Forward(latents_.to(dtype_), at::full({1}, timestep), context_));
    if (v.size(0) == 2) {
      const at::Tensor unconditional = v.slice(0, 1, 2);
      v = unconditional + kGuidance * (v.slice(0, 0, 1) - unconditional);
    }
    latents_ = solver_->Step(v, latents_);
    return latents_ - start_;
  }

  at::ScalarType dtype_ = at::kFloat;
  std::unique_ptr<WanTransformer> transformer_;
  std::unique_ptr<FlowSolver> solver_;
  WanContext context_;
  at::Tensor start_;
  at::Tensor latents_;
  size_t step_ = 0;
};

absl::StatusOr<Work> CreateTextEncoding(const Arguments& arguments, const WanConfig& config,
                                        Device& device) {
  ASSIGN_OR_RETURN(Checkpoint opened, Checkpoint::Open(arguments.repository + "/text_encoder"));
  const auto checkpoint = std::make_shared<const Checkpoint>(std::move(opened));
  ASSIGN_OR_RETURN(
      ComponentWeights weights,
      ComponentWeights::Load(*checkpoint, Umt5DeviceSpecs(config.text_encoder, arguments.dtype),
                             device, {.partial = true}));
  ASSIGN_OR_RETURN(
      HostTable tokens,
      HostTable::Create(checkpoint, Umt5TokenTable(config.text_encoder, arguments.dtype)));
  ASSIGN_OR_RETURN(SafetensorsFile inputs, SafetensorsFile::Open(arguments.inputs));
  ASSIGN_OR_RETURN(at::Tensor tensor, ReadTensor(inputs, "ids"));
  const std::vector<int64_t> ids(tensor.data_ptr<int64_t>(),
                                 tensor.data_ptr<int64_t>() + tensor.numel());
  auto encoder =
      std::make_shared<Umt5Encoder>(config.text_encoder, std::move(weights), std::move(tokens));
  return Work([encoder, ids] { return encoder->Encode(ids); });
}

absl::Status Save(const at::Tensor& result, const std::string& path) {
  const at::Tensor values = result.to(at::kFloat).contiguous();
  const auto* bytes = static_cast<const std::byte*>(values.data_ptr());
  return WriteSafetensors(path, {{.name = "result",
                                  .dtype = DType::kF32,
                                  .shape = values.sizes().vec(),
                                  .data = absl::MakeConstSpan(bytes, values.nbytes())}});
}

absl::Status Serve(const Work& work) {
  std::cout << "ready" << std::endl;
  at::Tensor result;
  for (std::string line; std::getline(std::cin, line);) {
    if (line == "run") {
      const auto start = std::chrono::steady_clock::now();
      ASSIGN_OR_RETURN(result, work());
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      std::cout << seconds.count() << std::endl;
    } else if (line.rfind("save ", 0) == 0) {
      RETURN_IF_ERROR(Save(result, line.substr(5)));
      std::cout << "saved" << std::endl;
    } else {
      return absl::InvalidArgumentError(absl::StrCat("unknown command: ", line));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Arguments> ParseArguments(const std::vector<std::string>& argv) {
  Arguments arguments;
  const bool denoise = argv.size() == 6 && argv[0] == "denoise";
  const bool text = argv.size() == 5 && argv[0] == "text";
  if ((!denoise && !text) || !absl::SimpleAtoi(argv[4], &arguments.threads) ||
      arguments.threads < 1 ||
      (denoise && (!absl::SimpleAtoi(argv[5], &arguments.branches) || arguments.branches < 1 ||
                   arguments.branches > 2))) {
    return absl::InvalidArgumentError(
        "usage: bench_components denoise REPOSITORY INPUTS DTYPE THREADS BRANCHES (1 or 2)\n"
        "       bench_components text REPOSITORY INPUTS DTYPE THREADS");
  }
  arguments.command = argv[0];
  arguments.repository = argv[1];
  arguments.inputs = argv[2];
  ASSIGN_OR_RETURN(arguments.dtype, ParseDType(argv[3]));
  return arguments;
}

absl::Status Main(const std::vector<std::string>& argv) {
  ASSIGN_OR_RETURN(const Arguments arguments, ParseArguments(argv));
  at::set_num_threads(arguments.threads);
  c10::InferenceMode inference;
  ASSIGN_OR_RETURN(const WanConfig config, ReadWanConfig(arguments.repository));
  ASSIGN_OR_RETURN(std::unique_ptr<Device> device, OpenDevice(DeviceKind::kCpu, 0));
  ASSIGN_OR_RETURN(const Work work, arguments.command == "denoise"
                                        ? DenoiseStep::Create(arguments, config, *device)
                                        : CreateTextEncoding(arguments, config, *device));
  return Serve(work);
}

}  // namespace
}  // namespace dlo

int main(int argc, char** argv) {
  try {
    const absl::Status status = dlo::Main(std::vector<std::string>(argv + 1, argv + argc));
    if (!status.ok()) std::cerr << "bench_components: " << status << std::endl;
    return status.ok() ? 0 : 1;
  } catch (const std::exception& error) {  // libtorch's
    std::cerr << "bench_components: " << error.what() << std::endl;
    return 1;
  }
}
