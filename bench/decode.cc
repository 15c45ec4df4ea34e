// Our half of bench/compare_decode.py: decodes latents with a repository's autoencoder.
//
//   bench_decode REPOSITORY LATENTS.safetensors THREADS
//
// The file holds a float32 tensor "latents" [1, z_dim, T, h, w], normalised. After "ready" each
// line on standard input decodes once and answers the wall and the processor seconds it took.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <time.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "base/status_macros.h"
#include "loader/safetensors.h"
#include "models/wan/vae.h"
#include "models/wan/wan_config.h"

namespace dlo {
namespace {

absl::StatusOr<std::map<std::string, at::Tensor>> ReadTensors(const std::filesystem::path& path) {
  ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(path));
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, entry] : file.tensors()) {
    if (entry.dtype != DType::kF32) continue;
    const at::Tensor tensor = at::empty(entry.shape, at::kFloat);
    std::memcpy(tensor.mutable_data_ptr<float>(), file.data(entry).data(),
                static_cast<size_t>(entry.bytes));
    tensors.emplace(name, tensor);
  }
  return tensors;
}

double ProcessorSeconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

absl::Status Main(const std::vector<std::string>& argv) {
  int threads = 0;
  if (argv.size() != 3 || !absl::SimpleAtoi(argv[2], &threads) || threads < 1) {
    return absl::InvalidArgumentError("usage: bench_decode REPOSITORY LATENTS.safetensors THREADS");
  }
  at::set_num_threads(threads);
  const std::filesystem::path root = argv[0];
  ASSIGN_OR_RETURN(const WanConfig config, ReadWanConfig(root));
  ASSIGN_OR_RETURN(const auto weights,
                   ReadTensors(root / "vae" / "diffusion_pytorch_model.safetensors"));
  ASSIGN_OR_RETURN(const auto inputs, ReadTensors(argv[1]));
  const WanVae vae(config.vae, [&](const std::string& name) { return weights.at(name); });
  const at::Tensor z = DenormaliseLatents(config.vae, inputs.at("latents"));
  std::cout << "ready" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    const auto begin = std::chrono::steady_clock::now();
    const double processor = ProcessorSeconds();
    vae.Decode(z, [](const at::Tensor&) { return true; });
    const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
    std::cout << wall.count() << " " << ProcessorSeconds() - processor << std::endl;
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace dlo

int main(int argc, char** argv) {
  const absl::Status status = dlo::Main({argv + 1, argv + argc});
  if (status.ok()) return 0;
  std::cerr << status << "\n";
  return 1;
}
