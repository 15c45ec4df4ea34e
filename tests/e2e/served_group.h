// A real dlo-serve with its workers, in a folder of its own, for tests that break them.
//
//   auto group = *ServedGroup::Create({.dp = 2});
//   group->Arm("denoising", "hold", 1);                  // worker/failpoints.h
//   ASSERT_TRUE(group->Start().ok());
//   ... group->WaitReached("denoising", 1) gives the process that holds there
//   ASSERT_TRUE(group->Stop().ok());                     // SIGTERM
//   EXPECT_EQ(group->Leftovers(), "");
//
// The programs are copies in the folder, dlo-worker a script around the real one that names the
// folder with the faults: so nothing that is shipped reads an environment variable for tests, and
// every process of the group has the folder in its command line. Processes that are left when the
// object goes are killed and the folder is removed. One thread at a time, but for channel(),
// address() and the paths.
#pragma once

#include <grpcpp/channel.h>
#include <sys/types.h>

#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tests/e2e/child_process.h"

namespace dlo {

class ServedGroup {
 public:
  struct Options {
    int dp = 1;
    std::string transfer = "none";       // of the weights
    std::vector<std::string> arguments;  // of dlo-serve, more
    // The worker program; empty: the real one. It must ignore flags that it does not know.
    std::filesystem::path worker;
    // Where jobs are kept; empty: in the folder.
    std::filesystem::path data_dir;
  };

  static absl::StatusOr<std::unique_ptr<ServedGroup>> Create(Options options);
  ~ServedGroup();

  // Starts dlo-serve (again). Returns once it answers, whether its workers are ready or not.
  absl::Status Start();
  // SIGTERM. Returns how long the process took to end; an error unless its exit code is 0.
  absl::StatusOr<absl::Duration> Stop();
  // SIGKILL, and waits for the end of dlo-serve itself.
  void Kill();

  pid_t serve_pid() const { return serve_->pid(); }
  // By rank; those that are there.
  std::map<int, pid_t> Workers() const;

  std::string address() const { return "unix:" + (folder_ / "api.sock").string(); }
  // A connection of its own.
  std::shared_ptr<grpc::Channel> channel() const;
  // Waits for the health service to say SERVING or NOT_SERVING; false after `timeout`.
  bool WaitServing(bool serving, absl::Duration timeout) const;

  // Faults; rank -1: of every rank.
  void Arm(const std::string& place, const std::string& action, int rank = -1) const;
  void Disarm(const std::string& place, int rank = -1) const;
  // The process that came to the place since the last Forget, but not `other_than`; -1 after
  // `timeout`.
  pid_t WaitReached(const std::string& place, int rank, pid_t other_than = -1,
                    absl::Duration timeout = absl::Seconds(60)) const;
  void Forget(const std::string& place) const;

  const std::filesystem::path& data_dir() const { return options_.data_dir; }
  // Parts of results.
  int CountPartialResults() const;

  // What is still there of a group that has ended: processes, sockets, names in shared memory,
  // temporary files; one line each. Processes and names get five seconds to go.
  std::string Leftovers() const;
  std::string Log() const;

 private:
  ServedGroup(Options options, std::filesystem::path folder)
      : options_(std::move(options)), folder_(std::move(folder)) {}
  absl::Status Prepare();
  std::vector<pid_t> Processes() const;
  std::vector<std::string> LeftoversNow() const;

  Options options_;
  std::filesystem::path folder_;
  std::set<std::string> shared_memory_before_;
  std::unique_ptr<ChildProcess> serve_;
};

// Of a process, in bytes, from smaps_rollup; 0 if it is gone.
struct ProcessMemory {
  int64_t rss_bytes = 0;
  int64_t pss_bytes = 0;
  int64_t private_dirty_bytes = 0;
};
ProcessMemory MemoryOf(pid_t pid);
int CountOpenFiles(pid_t pid);

}  // namespace dlo
