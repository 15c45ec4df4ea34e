// Times the decoding of latents with a model's autoencoder, for comparison with diffusers on the
// same latents (vae_diffusers.py).
//
//   vae_bench REPOSITORY LATENTS.safetensors [THREADS [REPEATS]]
//
// The file holds a float32 tensor "latents" [1, z_dim, T, h, w], normalised. Prints the seconds of
// each repeat, their minimum and median.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "loader/safetensors.h"
#include "models/wan/vae.h"
#include "models/wan/wan_config.h"

namespace dlo {
namespace {

std::map<std::string, at::Tensor> ReadTensors(const std::filesystem::path& path) {
  const auto file = SafetensorsFile::Open(path);
  if (!file.ok()) {
    std::fprintf(stderr, "%s\n", file.status().ToString().c_str());
    std::exit(1);
  }
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, entry] : file->tensors()) {
    if (entry.dtype != DType::kF32) continue;
    const at::Tensor tensor = at::empty(entry.shape, at::kFloat);
    std::memcpy(tensor.mutable_data_ptr<float>(), file->data(entry).data(), entry.bytes);
    tensors.emplace(name, tensor);
  }
  return tensors;
}

int Main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: vae_bench REPOSITORY LATENTS.safetensors [THREADS [REPEATS]]\n");
    return 2;
  }
  const std::filesystem::path root = argv[1];
  if (argc > 3) at::set_num_threads(std::atoi(argv[3]));
  const int repeats = argc > 4 ? std::max(1, std::atoi(argv[4])) : 10;
  const auto config = ReadWanConfig(root);
  if (!config.ok()) {
    std::fprintf(stderr, "%s\n", config.status().ToString().c_str());
    return 1;
  }
  const auto weights = ReadTensors(root / "vae" / "diffusion_pytorch_model.safetensors");
  const auto inputs = ReadTensors(argv[2]);
  const WanVae vae(config->vae, [&](const std::string& name) { return weights.at(name); });
  const at::Tensor z = DenormaliseLatents(config->vae, inputs.at("latents"));
  std::vector<double> seconds;
  for (int i = 0; i < repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    vae.Decode(z, [](const at::Tensor&) { return true; });
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    std::printf("%.4f ", seconds.back());
  }
  std::sort(seconds.begin(), seconds.end());
  std::printf("\nthreads %d: minimum %.4f s, median %.4f s\n", at::get_num_threads(),
              seconds.front(), seconds[seconds.size() / 2]);
  return 0;
}

}  // namespace
}  // namespace dlo

int main(int argc, char** argv) { return dlo::Main(argc, argv); }
