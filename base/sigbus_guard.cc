#include "base/sigbus_guard.h"

#include <setjmp.h>
#include <signal.h>

#include <atomic>
#include <cstring>

namespace dlo {
namespace {

// What this thread copies at the moment. The handler runs on the thread that faulted, so it needs
// no lock.
struct Guard {
  const std::byte* begin;
  const std::byte* end;
  sigjmp_buf resume;
};

// volatile: written around the copy for a reader the compiler does not see.
thread_local Guard* volatile t_guard = nullptr;

struct sigaction g_previous;

// Async-signal-safe.
void HandleSigbus(int signal, siginfo_t* info, void* context) {
  Guard* const guard = t_guard;
  const auto* const address = static_cast<const std::byte*>(info->si_addr);
  if (guard != nullptr && address >= guard->begin && address < guard->end) {
    siglongjmp(guard->resume, 1);
  }
  if ((g_previous.sa_flags & SA_SIGINFO) != 0) {
    g_previous.sa_sigaction(signal, info, context);
  } else if (g_previous.sa_handler != SIG_DFL && g_previous.sa_handler != SIG_IGN) {
    g_previous.sa_handler(signal);
  } else {
    // The access is repeated on return and ends the process where it happened.
    sigaction(SIGBUS, &g_previous, nullptr);
  }
}

bool Install() {
  struct sigaction action = {};
  action.sa_sigaction = HandleSigbus;
  // SA_NODEFER: leaving the handler by a jump must not leave the signal blocked.
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  return sigaction(SIGBUS, &action, &g_previous) == 0;
}

}  // namespace

bool GuardedCopy(std::byte* to, const std::byte* from, int64_t bytes) {
  [[maybe_unused]] static const bool installed = Install();
  if (bytes <= 0) return true;
  Guard guard;
  guard.begin = from;
  guard.end = from + bytes;
  if (sigsetjmp(guard.resume, /*savemask=*/0) != 0) {
    t_guard = nullptr;
    return false;
  }
  t_guard = &guard;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  std::memcpy(to, from, static_cast<size_t>(bytes));
  std::atomic_signal_fence(std::memory_order_seq_cst);
  t_guard = nullptr;
  return true;
}

}  // namespace dlo
