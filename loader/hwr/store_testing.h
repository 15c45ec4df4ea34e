// For the tests of loader/hwr/: a small artifact, processes, and a file layer that fails.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/sha256.h"
#include "gtest/gtest.h"
#include "loader/hwr/file_ops.h"
#include "loader/hwr/store.h"
#include "loader/test_folder.h"

namespace dlo::hwr {

// Two components, three parts and one, with gaps between tensors and behind them.
inline ArtifactLayout SmallLayout() {
  return {{.name = "transformer",
           .parts = {{.tensors = {{"proj", DType::kF32, {2, 3}, 0, 24},
                                  {"bias", DType::kBF16, {5}, 256, 10}},
                      .bytes = 512},
                     {.tensors = {{"blocks.0.w", DType::kBF16, {3000}, 0, 6000}}, .bytes = 6144},
                     {.tensors = {{"blocks.1.w", DType::kBF16, {3000}, 0, 6000}}, .bytes = 6144}}},
          {.name = "vae", .parts = {{.tensors = {{"w", DType::kF32, {4}, 0, 16}}, .bytes = 256}}}};
}

inline Identity SmallIdentity(const std::string& source = "source") {
  return *MakeIdentity({.source = Sha256Of(source),
                        .family = "wan",
                        .model_config = Sha256Of("config"),
                        .dtype = "BF16",
                        .layout = LayoutDigest(SmallLayout())});
}

// Bytes that depend on `seed` and the place, and rubbish between the tensors.
class SmallProducer : public PartProducer {
 public:
  explicit SmallProducer(uint8_t seed = 1) : seed_(seed) {}

  static std::byte At(uint8_t seed, int component, int part, int64_t offset) {
    return static_cast<std::byte>(seed * 31 + component * 17 + part * 7 + offset * 13 +
                                  offset / 256);
  }

  absl::Status Produce(int component, int part, absl::Span<std::byte> to) override {
    ++calls;
    if (on_produce) on_produce(component, part);
    if (!failure.ok()) return failure;
    std::memset(to.data(), 0xee, to.size());
    const ArtifactLayout layout = SmallLayout();
    for (const ArtifactTensor& tensor : layout[component].parts[part].tensors) {
      for (int64_t i = 0; i < tensor.bytes; ++i) {
        to[tensor.offset + i] = At(seed_, component, part, tensor.offset + i);
      }
    }
    return absl::OkStatus();
  }
  absl::Status CheckSources() override { return on_check ? on_check() : absl::OkStatus(); }

  int calls = 0;
  absl::Status failure;
  std::function<void(int component, int part)> on_produce;
  std::function<absl::Status()> on_check;

 private:
  const uint8_t seed_;
};

// Every byte that the lease gives is what the producer of that seed wrote, or zero.
inline bool HasBytesOf(const Lease& lease, uint8_t seed) {
  const ArtifactLayout layout = SmallLayout();
  if (lease.layout() != layout) return false;
  for (int c = 0; c < static_cast<int>(layout.size()); ++c) {
    std::vector<std::byte> expected(PayloadBytes(layout[c]));
    for (int p = 0; p < static_cast<int>(layout[c].parts.size()); ++p) {
      const int64_t begin = PartOffset(layout[c], p);
      for (const ArtifactTensor& tensor : layout[c].parts[p].tensors) {
        for (int64_t i = tensor.offset; i < tensor.offset + tensor.bytes; ++i) {
          expected[begin + i] = SmallProducer::At(seed, c, p, i);
        }
      }
      const absl::Span<const std::byte> part = lease.part(c, p);
      if (part.data() != lease.file(c).bytes().data() + begin ||
          part.size() != static_cast<size_t>(layout[c].parts[p].bytes)) {
        return false;
      }
    }
    if (lease.file(c).bytes() != absl::MakeConstSpan(expected)) return false;
  }
  return true;
}

inline std::unique_ptr<Store> OpenStore(const StoreOptions& options) {
  Store::OpenResult opened = Store::Open(options);
  if (Failure* failure = std::get_if<Failure>(&opened)) {
    ADD_FAILURE() << failure->Text();
    return nullptr;
  }
  return std::get<std::unique_ptr<Store>>(std::move(opened));
}

inline Failure OpenFailure(const StoreOptions& options) {
  Store::OpenResult opened = Store::Open(options);
  if (Failure* failure = std::get_if<Failure>(&opened)) return *failure;
  ADD_FAILURE() << "the store opens";
  return {};
}

inline absl::Time Soon(int milliseconds = 20'000) {
  return absl::Now() + absl::Milliseconds(milliseconds);
}

// Runs `body` in a child made by fork and ends it there with what it returns.
class Child {
 public:
  explicit Child(const std::function<int()>& body) {
    pid_ = fork();
    if (pid_ == 0) _exit(body());
  }
  ~Child() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      Wait();
    }
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  // The exit status, or minus the signal that ended it.
  int Wait() {
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  }

 private:
  pid_t pid_ = -1;
};

// Lines between processes. Reading ends at a newline.
class Pipe {
 public:
  Pipe() {
    if (pipe(ends_) != 0) std::abort();
  }
  ~Pipe() {
    close(ends_[0]);
    close(ends_[1]);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void Send(const std::string& line) const {
    const std::string text = line + "\n";
    if (write(ends_[1], text.data(), text.size()) < 0) std::abort();
  }
  std::string Receive() const {
    std::string line;
    char c = 0;
    while (read(ends_[0], &c, 1) == 1 && c != '\n') line.push_back(c);
    return line;
  }

 private:
  int ends_[2];
};

// Files below a folder: "mode size digest" by relative name, "mode" for folders.
inline std::map<std::string, std::string> Snapshot(const std::filesystem::path& root) {
  namespace fs = std::filesystem;
  std::map<std::string, std::string> files;
  const auto mode = [](const fs::directory_entry& entry) {
    return absl::StrCat(static_cast<int>(entry.symlink_status().permissions()));
  };
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    const std::string name = entry.path().lexically_relative(root).native();
    files[name] = mode(entry);
    if (!entry.is_regular_file()) continue;
    std::ifstream in(entry.path(), std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    absl::StrAppend(&files[name], " ", bytes.size(), " ", Sha256Of(bytes));
  }
  return files;
}

// Counts the operations that change something, and lets one of them fail, or be the first that is
// not done, or the last one before the process is killed.
class FaultyFileOps : public FileOps {
 public:
  enum class Fault { kNone, kFail, kKillBefore, kKillAfter };

  // At the operation of that number, counted from 0.
  void Arm(int number, Fault fault, int code = EIO) {
    count_ = 0;
    number_ = number;
    fault_ = fault;
    code_ = code;
  }
  int count() const { return count_; }
  const std::string& last() const { return last_; }  // what was armed for

  std::atomic<int64_t> bytes_read = 0;
  int64_t free_bytes = -1;                           // not -1: what FreeBytes gives
  std::function<int(const std::string& what)> fail;  // an errno, or 0: by name of the operation
  std::function<void()> on_read;

  int OpenAt(int folder, const char* name, int flags, mode_t mode) override {
    if ((flags & O_CREAT) == 0) return FileOps::OpenAt(folder, name, flags, mode);
    return Do<int>("create", name, [&] { return FileOps::OpenAt(folder, name, flags, mode); });
  }
  int MkdirAt(int folder, const char* name, mode_t mode) override {
    return Do<int>("mkdir", name, [&] { return FileOps::MkdirAt(folder, name, mode); });
  }
  ssize_t Write(int fd, const void* bytes, size_t size) override {
    return Do<ssize_t>(
        "write", "", [&] { return FileOps::Write(fd, bytes, size); },
        // A disk that is full takes what it can.
        [&] { FileOps::Write(fd, bytes, size / 2); });
  }
  int Allocate(int fd, int64_t bytes) override {
    return Do<int>("allocate", "", [&] { return FileOps::Allocate(fd, bytes); });
  }
  int Fsync(int fd) override {
    return Do<int>("fsync", "", [&] { return FileOps::Fsync(fd); });
  }
  int RenameAt(int from_folder, const char* from, int to_folder, const char* to) override {
    return Do<int>("rename", from,
                   [&] { return FileOps::RenameAt(from_folder, from, to_folder, to); });
  }
  int UnlinkAt(int folder, const char* name, int flags) override {
    return Do<int>("unlink", name, [&] { return FileOps::UnlinkAt(folder, name, flags); });
  }
  int Chmod(int fd, mode_t mode) override {
    return Do<int>("chmod", "", [&] { return FileOps::Chmod(fd, mode); });
  }
  ssize_t ReadAt(int fd, void* to, size_t size, int64_t offset) override {
    if (on_read) on_read();
    if (fail) {
      if (const int code = fail("read")) {
        errno = code;
        return -1;
      }
    }
    const ssize_t got = FileOps::ReadAt(fd, to, size, offset);
    if (got > 0) bytes_read += got;
    return got;
  }
  int64_t FreeBytes(int fd) override {
    return free_bytes >= 0 ? free_bytes : FileOps::FreeBytes(fd);
  }

 private:
  template <typename Result, typename F>
  Result Do(const char* what, const char* name, F f, const std::function<void()>& half = {}) {
    const std::string described = absl::StrCat(what, " ", name);
    if (fail) {
      if (const int code = fail(described)) {
        errno = code;
        return -1;
      }
    }
    const bool now = count_++ == number_;
    if (!now || fault_ == Fault::kNone) return f();
    last_ = described;
    switch (fault_) {
      case Fault::kFail:
        if (half) half();
        errno = code_;
        return -1;
      case Fault::kKillBefore:
        if (half) half();
        break;
      default:
        f();
    }
    kill(getpid(), SIGKILL);
    while (true) pause();
  }

  int count_ = 0;
  int number_ = -1;
  Fault fault_ = Fault::kNone;
  int code_ = EIO;
  std::string last_;
};

}  // namespace dlo::hwr
