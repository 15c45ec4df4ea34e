// Counts the calls of a server that have not ended, so that a shutdown can wait for them and for
// nothing else.
//
//   OpenCalls calls;
//   calls.Watch(&builder);                   // before the server is built
//   calls.WaitNone(absl::Now() + grace);
//
// Calls that only end with their client (the health service's Watch, reflection) do not count.
// Thread-safe; outlives the server.
#pragma once

#include <grpcpp/server_builder.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace dlo {

class OpenCalls {
 public:
  void Watch(grpc::ServerBuilder* builder);

  // Whether there was a moment without a call before `deadline`.
  bool WaitNone(absl::Time deadline);

 private:
  class Factory;
  class Call;

  absl::Mutex mutex_;
  int count_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace dlo
