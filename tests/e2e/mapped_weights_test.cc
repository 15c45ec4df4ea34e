// The memory of several workers that stream one checkpoint, and what they do when it changes: the
// real programs on a repository of random weights made here.
//
//   mapped_weights_test               300 MB of blocks, also in private memory for comparison
//   mapped_weights_test --full-size   the transformer of Wan 2.1 1.3B in bfloat16, 2.8 GB
#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/safetensors.h"
#include "loader/test_folder.h"
#include "models/wan/transformer_specs.h"
#include "models/wan/wan_config.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/child_process.h"

namespace dlo {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr absl::Duration kTimeout = absl::Minutes(3);
constexpr int kReplicas = 4;
bool full_size = false;

std::string Binary(const std::string& name) { return absl::StrCat(DLO_BINARY_DIR, "/bin/", name); }

// A transformer of the small shape has 72 blocks of 8.4 MB; Wan 2.1 1.3B has 30 of 93 MB.
struct Shape {
  int heads = 4;
  int ffn = 2048;
  int blocks = 72;
};
constexpr Shape kSmall = {};
constexpr Shape kWan13B = {.heads = 12, .ffn = 8960, .blocks = 30};

// Writes a tensor's worth of random numbers between 2^-7 and 2^-6 or their negatives.
class RandomBytes {
 public:
  RandomBytes() : words_((16 << 20) / 2) {
    std::mt19937_64 random(1);
    for (size_t i = 0; i < words_.size(); i += 4) {
      const uint64_t bits = (random() & 0x807F'807F'807F'807F) | 0x3C00'3C00'3C00'3C00;
      std::memcpy(&words_[i], &bits, sizeof(bits));
    }
  }
  void Write(std::ofstream& out, int64_t bytes) {
    while (bytes > 0) {
      // Another start each time, so that no two tensors are alike.
      next_ = (next_ + 65'537 * 2) % (words_.size() / 2);
      const int64_t chunk =
          std::min(bytes, static_cast<int64_t>((words_.size() - next_) * sizeof(uint16_t)));
      out.write(reinterpret_cast<const char*>(&words_[next_]), chunk);
      bytes -= chunk;
    }
  }

 private:
  std::vector<uint16_t> words_;  // bfloat16; two of them are also a float32
  size_t next_ = 0;
};

// A repository of Wan 2.1's structure whose transformer has the given shape, stored as it runs in
// bfloat16. Everything else is tiny.
class Repository {
 public:
  explicit Repository(const Shape& shape) {
    const std::filesystem::path tiny =
        std::filesystem::path(DLO_SOURCE_DIR) / "tests/goldens/pipelines/wan21-bf16/repo";
    std::filesystem::copy(tiny, folder_.path(),
                          std::filesystem::copy_options::recursive |
                              std::filesystem::copy_options::overwrite_existing);
    const auto json_path = folder_ / "transformer/config.json";
    nlohmann::json json = nlohmann::json::parse(std::ifstream(json_path));
    json["attention_head_dim"] = 128;
    json["num_attention_heads"] = shape.heads;
    json["ffn_dim"] = shape.ffn;
    json["num_layers"] = shape.blocks;
    std::filesystem::remove(json_path);
    std::ofstream(json_path) << json;
    WriteTransformer();
  }

  const std::filesystem::path& path() const { return folder_.path(); }
  std::filesystem::path transformer() const {
    return folder_ / "transformer/diffusion_pytorch_model.safetensors";
  }
  int64_t block_bytes() const { return block_bytes_; }  // of all blocks together

 private:
  void WriteTransformer() {
    const auto config = ReadWanConfig(path());
    ASSERT_TRUE(config.ok()) << config.status();
    std::vector<SafetensorsTensor> tensors;
    for (const TensorSpec& spec : WanTransformerSpecs(config->transformer, DType::kBF16)) {
      tensors.push_back({spec.name, spec.dtype, spec.shape, {}});
      if (spec.block >= 0) block_bytes_ += spec.bytes();
    }
    const auto preamble = SafetensorsPreamble(tensors);
    ASSERT_TRUE(preamble.ok()) << preamble.status();
    std::filesystem::remove(transformer());
    std::ofstream out(transformer(), std::ios::binary);
    out << *preamble;
    RandomBytes random;
    for (const SafetensorsTensor& tensor : tensors) {
      int64_t bytes = DTypeBytes(tensor.dtype);
      for (int64_t size : tensor.shape) bytes *= size;
      random.Write(out, bytes);
    }
    ASSERT_TRUE(out.flush().good());
  }

  TempFolder folder_;
  int64_t block_bytes_ = 0;
};

// dlo-serve with kReplicas workers on a repository.
class Server {
 public:
  Server(const Repository& repository, const std::string& mmap) {
    auto serve = ChildProcess::Start(
        {Binary("dlo-serve"), "--model", repository.path().native(), "--dtype", "bfloat16", "--dp",
         absl::StrCat(kReplicas), "--transfer", "rank-local", "--checkpoint-mmap", mmap, "--listen",
         "127.0.0.1:0", "--data-dir", (folder_ / "data").native()},
        {"OMP_NUM_THREADS=1"});
    if (!serve.ok()) Abort(serve.status().ToString());
    serve_ = *std::move(serve);
    const auto line = serve_->WaitForLine("serving on ", kTimeout);
    if (!line.ok()) Abort(line.status().ToString());
    const std::vector<std::string> parts = absl::StrSplit(*line, "serving on ");
    endpoint_ = parts.back().substr(0, parts.back().find_first_of(" ,"));
    const std::string status =
        Client({"status", "--endpoint", endpoint_, "--wait", absl::FormatDuration(kTimeout)});
    if (!absl::StrContains(status, "SERVING")) Abort(status);
  }
  ~Server() {
    serve_->Signal(SIGTERM);
    const auto code = serve_->Wait(kTimeout);
    EXPECT_TRUE(code.ok() && *code == 0) << serve_->output();
  }

  // One request on each replica at once; what each client wrote, sorted.
  std::vector<std::string> GenerateOnAll() {
    std::vector<std::unique_ptr<ChildProcess>> clients;
    for (int i = 0; i < kReplicas; ++i) {
      clients.push_back(*ChildProcess::Start({Binary("dlo-client"),
                                              "generate",
                                              "--endpoint",
                                              endpoint_,
                                              "--prompt",
                                              "a square",
                                              "--seed",
                                              "1",
                                              "--width",
                                              "16",
                                              "--height",
                                              "16",
                                              "--frames",
                                              "1",
                                              "--steps",
                                              "2",
                                              "--guidance-scale",
                                              "1",
                                              "--quiet",
                                              "--output",
                                              Video(i).native()}));
    }
    std::vector<std::string> outputs;
    for (auto& client : clients) {
      const auto code = client->Wait(kTimeout);
      outputs.push_back(absl::StrCat(code.ok() ? *code : -1, " ", client->output()));
    }
    return outputs;
  }
  std::string VideoBytes(int i) const {
    std::ifstream in(Video(i), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  std::string Status() { return Client({"status", "--endpoint", endpoint_}); }

  // The children of dlo-serve.
  std::vector<int> Workers() const {
    std::vector<int> pids;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      int pid = 0;
      if (!absl::SimpleAtoi(entry.path().filename().native(), &pid)) continue;
      std::ifstream in(entry.path() / "stat");
      std::string stat;
      std::getline(in, stat);
      // "PID (name) state parent ..."
      const std::vector<std::string> fields = absl::StrSplit(
          stat.substr(std::min(stat.rfind(')') + 1, stat.size())), ' ', absl::SkipEmpty());
      if (fields.size() > 1 && fields[1] == absl::StrCat(serve_->pid())) pids.push_back(pid);
    }
    std::sort(pids.begin(), pids.end());
    return pids;
  }

  // The proportional set sizes of all workers: a page that n processes map counts 1 / n in each.
  int64_t PssBytes() const {
    int64_t bytes = 0;
    for (int pid : Workers()) {
      std::ifstream in(absl::StrCat("/proc/", pid, "/smaps_rollup"));
      for (std::string line; std::getline(in, line);) {
        if (line.starts_with("Pss:")) bytes += std::stoll(line.substr(4)) << 10;
      }
    }
    return bytes;
  }

  const std::string& log() const { return serve_->output(); }

 private:
  [[noreturn]] static void Abort(const std::string& why) {
    std::cerr << why << std::endl;
    std::abort();
  }
  std::string Client(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), Binary("dlo-client"));
    auto client = ChildProcess::Start(arguments);
    if (!client.ok()) return client.status().ToString();
    (*client)->Wait(kTimeout).IgnoreError();
    return (*client)->output();
  }
  std::filesystem::path Video(int i) const {
    return folder_ / absl::StrCat("video", i, ".safetensors");
  }

  TempFolder folder_;
  std::unique_ptr<ChildProcess> serve_;
  std::string endpoint_;
};

// What four workers on `shape` hold after each has run requests, and one of their videos.
struct Measured {
  int64_t pss_bytes = 0;
  int64_t block_bytes = 0;
  std::string video;
};

Measured Measure(const Repository& repository, const std::string& mmap) {
  Server server(repository, mmap);
  // Twice: in the first round some workers may still be loading.
  for (int round = 0; round < 2; ++round) {
    for (const std::string& output : server.GenerateOnAll()) {
      EXPECT_TRUE(output.starts_with("0 ")) << output << server.log();
    }
  }
  for (absl::string_view line : absl::StrSplit(server.log(), '\n')) {
    if (absl::StrContains(line, "transformer: ") && absl::StrContains(line, "faulted in")) {
      std::cout << line << std::endl;
    }
  }
  EXPECT_EQ(server.Workers().size(), static_cast<size_t>(kReplicas));
  for (int i = 1; i < kReplicas; ++i) EXPECT_EQ(server.VideoBytes(i), server.VideoBytes(0));
  return {server.PssBytes(), repository.block_bytes(), server.VideoBytes(0)};
}

double Mb(int64_t bytes) { return static_cast<double>(bytes) / 1e6; }

// A worker of the same shape with a single block has everything that a worker has - programs and
// libraries, slots, staging buffers, weights outside the blocks, the other components - but the
// streamed bytes.
TEST(MappedWeights, ReplicasShareOneCopyOfTheStreamedBytes) {
  const Shape shape = full_size ? kWan13B : kSmall;
  Shape single = shape;
  single.blocks = 1;
  const Measured empty = Measure(Repository(single), "on");
  const int64_t empty_bytes = empty.pss_bytes - empty.block_bytes;
  const Repository repository(shape);
  const Measured mapped = Measure(repository, "on");
  const int64_t bound = mapped.block_bytes + empty_bytes + mapped.block_bytes / 20;
  std::cout << kReplicas << " workers: " << Mb(mapped.pss_bytes) << " MB PSS with "
            << Mb(mapped.block_bytes) << " MB of blocks mapped; " << Mb(empty_bytes)
            << " MB without streamed bytes; at most " << Mb(bound) << " MB allowed, "
            << 100.0 * static_cast<double>(mapped.pss_bytes - empty_bytes - mapped.block_bytes) /
                   static_cast<double>(mapped.block_bytes)
            << " % over one copy" << std::endl;
  EXPECT_LE(mapped.pss_bytes, bound);
  // The pages are there and counted.
  EXPECT_GE(mapped.pss_bytes, empty_bytes + mapped.block_bytes * 9 / 10);
  if (full_size) return;

  const Measured copied = Measure(repository, "off");
  std::cout << Mb(copied.pss_bytes) << " MB PSS with blocks in private memory" << std::endl;
  EXPECT_GE(copied.pss_bytes, empty_bytes + copied.block_bytes * (kReplicas * 9) / 10);
  EXPECT_EQ(copied.video, mapped.video);
}

TEST(MappedWeights, ACheckpointThatIsCutFailsRequestsWithItsNameAndTheServerLives) {
  const Repository repository({.blocks = 3});
  Server server(repository, "on");
  for (const std::string& output : server.GenerateOnAll()) {
    ASSERT_TRUE(output.starts_with("0 ")) << output << server.log();
  }
  const std::vector<int> workers = server.Workers();
  ASSERT_EQ(truncate(repository.transformer().c_str(), 1 << 20), 0);
  for (int round = 0; round < 2; ++round) {
    for (const std::string& output : server.GenerateOnAll()) {
      EXPECT_THAT(output, AllOf(HasSubstr("WEIGHTS_CHANGED"), HasSubstr("tensor \"blocks."),
                                HasSubstr(repository.transformer().native()),
                                HasSubstr("was truncated from")));
    }
  }
  EXPECT_THAT(server.Status(), HasSubstr("SERVING"));
  EXPECT_THAT(server.Status(), testing::Not(HasSubstr("NOT_SERVING")));
  EXPECT_EQ(server.Workers(), workers);
}

}  // namespace
}  // namespace dlo

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--full-size") {
      dlo::full_size = true;
    } else {
      std::cerr << "unknown argument " << argv[i] << " (known: --full-size)\n";
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
