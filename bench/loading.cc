// How fast weights are loaded, beside what the disk and the memory of the same machine give.
//
//   bench_loading FOLDER [GIB [ROUNDS]]
//
// Writes a float32 checkpoint of GIB (2) GiB to FOLDER, which must be on a real disk, and removes
// it at the end. With a cold page cache, in turns: read() of the whole file from front to back,
// loading it as bfloat16, loading it as fp8, loading rank 0's half of its rows and of its columns,
// and faulting its mapping in. With a warm one, on one thread and by its processor time: memcpy of
// the same bytes between two buffers, casting between two buffers, and loading; once with a page
// cache that loading has filled from the disk, once with one that holds what was written a few KiB
// at a time, as downloads and copies do (Linux keeps the file in pieces of 2 MiB, or in small
// ones). Prints medians of ROUNDS (5), and ratios of bytes a second; in memory both bytes read and
// bytes written count. Buffers begin at a page, as those that weights are loaded to do, and have
// been written to before, but for fresh ones, whose pages Linux clears when they are first written
// to.
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "loader/cast.h"
#include "loader/fault_in.h"
#include "loader/weights.h"

namespace dlo {
namespace {

constexpr int64_t kRows = 1536, kColumns = 8960;  // a layer of Wan 2.1 1.3B
constexpr int64_t kTensorBytes = kRows * kColumns * 4;
constexpr int64_t kReadBytes = int64_t{8} << 20;
constexpr int64_t kSmallWriteBytes = int64_t{16} << 10;
static_assert(kTensorBytes % kSmallWriteBytes == 0);

absl::Status WriteCheckpoint(const std::filesystem::path& path, int64_t num_tensors) {
  std::vector<SafetensorsTensor> tensors;
  for (int64_t i = 0; i < num_tensors; ++i) {
    tensors.push_back({absl::StrCat("blocks.", i, ".weight"), DType::kF32, {kRows, kColumns}, {}});
  }
  ASSIGN_OR_RETURN(const std::string preamble, SafetensorsPreamble(tensors));
  std::ofstream file(path, std::ios::binary);
  file << preamble;
  std::vector<float> values(kRows * kColumns);
  uint32_t random = 1;
  for (float& value : values) {
    random = random * 1664525 + 1013904223;
    value = static_cast<float>(static_cast<int32_t>(random)) * 0x1p-36f;
  }
  for (int64_t i = 0; i < num_tensors; ++i) {
    for (int64_t at = 0; at < kTensorBytes; at += kSmallWriteBytes) {
      file.write(reinterpret_cast<const char*>(values.data()) + at, kSmallWriteBytes);
    }
  }
  file.close();
  return file ? absl::OkStatus()
              : absl::UnavailableError(absl::StrCat("cannot write ", path.native()));
}

// Leaves none of the file in the page cache. The file must not be mapped.
absl::Status DropFromCache(const std::filesystem::path& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, path.native());
  const absl::Cleanup close_fd = [fd] { close(fd); };
  fsync(fd);
  const int error = posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  return error == 0 ? absl::OkStatus() : absl::ErrnoToStatus(error, path.native());
}

absl::Status ReadFile(const std::filesystem::path& path, std::byte* buffer) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, path.native());
  const absl::Cleanup close_fd = [fd] { close(fd); };
  while (true) {
    const ssize_t got = read(fd, buffer, kReadBytes);
    if (got < 0) return absl::ErrnoToStatus(errno, path.native());
    if (got == 0) return absl::OkStatus();
  }
}

template <clockid_t kClock>
double Seconds() {
  timespec t;
  clock_gettime(kClock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

class Bench {
 public:
  Bench(std::filesystem::path folder, int64_t num_tensors, int rounds)
      : folder_(std::move(folder)), num_tensors_(num_tensors), rounds_(rounds) {}

  absl::Status Run() {
    RETURN_IF_ERROR(WriteCheckpoint(file(), num_tensors_));
    const absl::Cleanup remove = [this] { std::filesystem::remove(file()); };
    for (std::byte** buffer : {&source_, &destination_}) {
      *buffer = static_cast<std::byte*>(std::aligned_alloc(4096, bytes()));
      if (*buffer == nullptr) return absl::ResourceExhaustedError("no memory for the buffers");
      std::memset(*buffer, 0x3B, bytes());
    }
    const absl::Cleanup free_buffers = [this] {
      UnmapFresh();
      std::free(source_);
      std::free(destination_);
    };
    for (int64_t i = 0; i < num_tensors_; ++i) {
      destinations_.push_back(destination_ + i * kTensorBytes);
    }
    RETURN_IF_ERROR(Cold());
    RETURN_IF_ERROR(DropFromCache(file()));
    RETURN_IF_ERROR(Load(Specs(DType::kBF16), 0));
    RETURN_IF_ERROR(Warm("filled by loading"));
    std::filesystem::remove(file());
    RETURN_IF_ERROR(WriteCheckpoint(file(), num_tensors_));
    return Warm("filled by small writes");
  }

 private:
  std::filesystem::path file() const { return folder_ / "model.safetensors"; }
  int64_t bytes() const { return num_tensors_ * kTensorBytes; }

  std::vector<TensorSpec> Specs(DType dtype) const {
    std::vector<TensorSpec> specs;
    for (int64_t i = 0; i < num_tensors_; ++i) {
      specs.push_back({.name = absl::StrCat("blocks.", i, ".weight"),
                       .shape = {kRows, kColumns},
                       .dtype = dtype});
    }
    return specs;
  }
  std::vector<TensorSpec> Halves(int dim) const {
    std::vector<TensorSpec> specs = Specs(DType::kBF16);
    for (TensorSpec& spec : specs) {
      spec.slice = TensorSlice{dim, 0, spec.shape[dim]};
      spec.shape[dim] /= 2;
    }
    return specs;
  }

  absl::Status Load(std::vector<TensorSpec> specs, int threads, bool fp8 = false) {
    return LoadTo(destinations_, std::move(specs), threads, fp8);
  }

  absl::Status LoadTo(std::vector<std::byte*> destinations, std::vector<TensorSpec> specs,
                      int threads, bool fp8 = false) {
    ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(folder_));
    std::vector<float> scales(specs.size());
    for (int64_t i = 0; fp8 && i < num_tensors_; ++i) {
      specs[i].scale = absl::StrCat(specs[i].name, "_scale");
      specs[i].dtype = DType::kF8E4M3;
      specs.push_back({.name = specs[i].scale, .shape = {1}, .dtype = DType::kF32});
      destinations.push_back(reinterpret_cast<std::byte*>(&scales[i]));
    }
    return LoadTensors(checkpoint, specs, destinations, {.threads = threads});
  }

  // Memory that nobody has written to yet.
  absl::Status MapFresh() {
    void* const fresh =
        mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) return absl::ErrnoToStatus(errno, "mmap");
    fresh_ = static_cast<std::byte*>(fresh);
    return absl::OkStatus();
  }
  void UnmapFresh() {
    if (fresh_ != nullptr) munmap(std::exchange(fresh_, nullptr), bytes());
  }

  absl::Status LoadFresh(const std::vector<TensorSpec>& specs) {
    RETURN_IF_ERROR(MapFresh());
    std::vector<std::byte*> destinations;
    for (int64_t i = 0; i < num_tensors_; ++i) {
      destinations.push_back(fresh_ + i * specs[0].bytes());
    }
    return LoadTo(destinations, specs, 1);
  }

  absl::Status FaultInFile() {
    ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(folder_));
    std::vector<PackPiece> pieces;
    for (const TensorSpec& spec : Specs(DType::kF32)) {
      const TensorSource source = *checkpoint.Find(spec.name);
      pieces.push_back({.source = source.data.data(),
                        .bytes = static_cast<int64_t>(source.data.size()),
                        .file = source.mapping,
                        .tensor = source.name});
    }
    return FaultIn(pieces, /*threads=*/0).status();
  }

  struct Case {
    std::string name;
    double bytes;  // that count
    std::function<absl::Status()> run;
  };

  // The first case is the measure of the others. `now` is a clock in seconds; `before` prepares
  // each run.
  absl::Status Measure(const std::vector<Case>& cases, double (*now)(),
                       const std::function<absl::Status()>& before) {
    std::vector<std::vector<double>> seconds(cases.size());
    for (int round = 0; round < rounds_; ++round) {
      for (size_t i = 0; i < cases.size(); ++i) {
        RETURN_IF_ERROR(before());
        const double start = now();
        RETURN_IF_ERROR(cases[i].run());
        seconds[i].push_back(now() - start);
      }
    }
    double measure = 0;
    for (size_t i = 0; i < cases.size(); ++i) {
      std::sort(seconds[i].begin(), seconds[i].end());
      const double median = seconds[i][seconds[i].size() / 2];
      const double speed = cases[i].bytes / median / 1e9;
      if (i == 0) measure = speed;
      std::cout << absl::StrFormat("  %-44s %7.3f s  %6.2f GB/s  ratio %.2f  (%.2f to %.2f GB/s)\n",
                                   cases[i].name, median, speed, speed / measure,
                                   cases[i].bytes / seconds[i].back() / 1e9,
                                   cases[i].bytes / seconds[i].front() / 1e9)
                << std::flush;
    }
    return absl::OkStatus();
  }

  absl::Status Cold() {
    const auto all = static_cast<double>(bytes());
    std::cout << "cold page cache, bytes of the file a second:\n";
    return Measure(
        {{"read() of 8 MiB at a time", all, [this] { return ReadFile(file(), source_); }},
         {"load as bfloat16", all, [this] { return Load(Specs(DType::kBF16), 0); }},
         {"load as fp8", all, [this] { return Load(Specs(DType::kBF16), 0, true); }},
         {"load half of the rows", all / 2, [this] { return Load(Halves(0), 0); }},
         {"load half of the columns", all / 2, [this] { return Load(Halves(1), 0); }},
         {"fault the mapping in", all, [this] { return FaultInFile(); }}},
        Seconds<CLOCK_MONOTONIC>, [this] { return DropFromCache(file()); });
  }

  absl::Status Warm(const std::string& cache) {
    const auto all = static_cast<double>(bytes());
    std::cout << "page cache " << cache << ", bytes read and written a second of one core:\n";
    return Measure(
        {{"memcpy", 2 * all,
          [this] {
            std::memcpy(destination_, source_, bytes());
            return absl::OkStatus();
          }},
         {"cast between buffers, float32 to bfloat16", 1.5 * all,
          [this] {
            CastElements(DType::kF32, source_, DType::kBF16, destination_, bytes() / 4);
            return absl::OkStatus();
          }},
         {"memcpy to fresh memory", 2 * all,
          [this] {
            RETURN_IF_ERROR(MapFresh());
            std::memcpy(fresh_, source_, bytes());
            return absl::OkStatus();
          }},
         {"load as it is stored", 2 * all, [this] { return Load(Specs(DType::kF32), 1); }},
         {"load as bfloat16", 1.5 * all, [this] { return Load(Specs(DType::kBF16), 1); }},
         {"load as bfloat16 to fresh memory", 1.5 * all,
          [this] { return LoadFresh(Specs(DType::kBF16)); }},
         {"load as fp8 (reads twice)", 2.25 * all,
          [this] { return Load(Specs(DType::kBF16), 1, true); }}},
        Seconds<CLOCK_THREAD_CPUTIME_ID>, [this] {
          UnmapFresh();
          return absl::OkStatus();
        });
  }

  const std::filesystem::path folder_;
  const int64_t num_tensors_;
  const int rounds_;
  std::byte* source_ = nullptr;
  std::byte* destination_ = nullptr;
  std::vector<std::byte*> destinations_;
  std::byte* fresh_ = nullptr;
};

absl::Status Main(const std::vector<std::string>& argv) {
  int gib = 2, rounds = 5;
  if (argv.empty() || (argv.size() > 1 && !absl::SimpleAtoi(argv[1], &gib)) ||
      (argv.size() > 2 && !absl::SimpleAtoi(argv[2], &rounds)) || gib < 1 || rounds < 1) {
    return absl::InvalidArgumentError("usage: bench_loading FOLDER [GIB [ROUNDS]]");
  }
  return Bench(argv[0], (int64_t{gib} << 30) / kTensorBytes, rounds).Run();
}

}  // namespace
}  // namespace dlo

int main(int argc, char** argv) {
  const absl::Status status = dlo::Main({argv + 1, argv + argc});
  if (status.ok()) return 0;
  std::cerr << "bench_loading: " << status.message() << '\n';
  return 1;
}
