#include "loader/chunk_threads.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"

namespace dlo {

absl::StatusOr<int> RunChunks(int64_t num_chunks, int threads, absl::string_view what,
                              absl::FunctionRef<absl::Status(int64_t)> chunk) {
  std::atomic<int64_t> next = 0;
  std::atomic<bool> failed = false;
  absl::Mutex mutex;
  int64_t first_failed = num_chunks;  // all before it have begun, too
  absl::Status first_error;
  const auto run = [&] {
    // A chunk once taken is run, whatever has failed meanwhile: a later one may wait for it.
    while (!failed) {
      const int64_t i = next++;
      if (i >= num_chunks) return;
      absl::Status status = chunk(i);
      if (status.ok()) continue;
      const absl::MutexLock lock(&mutex);
      failed = true;
      if (i > first_failed) continue;
      first_failed = i;
      first_error = std::move(status);
    }
  };
  const int64_t wanted =
      threads > 0 ? threads : static_cast<int64_t>(std::thread::hardware_concurrency());
  std::vector<std::thread> helpers;
  try {
    while (static_cast<int64_t>(helpers.size()) + 1 < std::min(wanted, num_chunks)) {
      helpers.emplace_back(run);
    }
  } catch (const std::system_error& error) {
    spdlog::warn("{} with {} threads instead of {}: {}", std::string(what), helpers.size() + 1,
                 wanted, error.what());
  }
  run();
  for (std::thread& helper : helpers) helper.join();
  if (failed) return first_error;
  return static_cast<int>(helpers.size()) + 1;
}

}  // namespace dlo
