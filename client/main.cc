#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <iostream>
#include <thread>

#include "client/client.h"
#include "client/console.h"
#include "google/protobuf/stubs/logging.h"

namespace dlo {
namespace {

// Turns Ctrl-C and TERM into an Interrupt, on a thread, where any code may run. Created before
// every other thread, so that all of them leave the signals to this one.
class SignalWatcher {
 public:
  explicit SignalWatcher(Interrupt* interrupt) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    signals_fd_ = signalfd(-1, &signals, SFD_CLOEXEC);
    stop_fd_ = eventfd(0, EFD_CLOEXEC);
    thread_ = std::thread([this, interrupt] { Watch(interrupt); });
  }
  ~SignalWatcher() {
    eventfd_write(stop_fd_, 1);
    thread_.join();
    close(signals_fd_);
    close(stop_fd_);
  }

 private:
  void Watch(Interrupt* interrupt) {
    pollfd fds[] = {{.fd = signals_fd_, .events = POLLIN}, {.fd = stop_fd_, .events = POLLIN}};
    for (;;) {
      if (poll(fds, 2, -1) < 0) continue;
      if (fds[1].revents != 0) return;
      signalfd_siginfo info;
      if (read(signals_fd_, &info, sizeof(info)) == sizeof(info)) {
        interrupt->Trigger(static_cast<int>(info.ssi_signo));
      }
    }
  }

  int signals_fd_ = -1;
  int stop_fd_ = -1;
  std::thread thread_;
};

int TerminalColumns() {
  winsize size{};
  constexpr int kUsual = 80;
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kUsual;
  return size.ws_col;
}

}  // namespace
}  // namespace dlo

int main(int argc, char** argv) {
  // gRPC's own log lines would stand between ours; what they say comes back as the call's error.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  // The same of a prompt that is not UTF-8: the server names the field.
  google::protobuf::SetLogHandler(nullptr);
  dlo::Interrupt interrupt;
  dlo::SignalWatcher watcher(&interrupt);
  dlo::Console console{.in = &std::cin, .out = &std::cout, .err = &std::cerr};
  if (isatty(STDERR_FILENO)) console.columns = dlo::TerminalColumns;
  return dlo::RunClient(argc, argv, console, interrupt);
}
