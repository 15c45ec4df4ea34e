// The header of libtorch's process group needs Gloo's own, which come from Debian (headers only);
// libtorch's copy of Gloo is newer, so nothing here touches a Gloo object but through libtorch.
#define USE_C10D_GLOO

#include "runtime/cpu/gloo_communicator.h"

#include <ATen/ops/from_blob.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/memory/memory.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "runtime/communicator_host.h"

namespace dlo {
namespace {

using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroupGloo>;

// For a call to the store that has no deadline of its own.
constexpr absl::Duration kStoreTimeout = absl::Seconds(30);

// c10d takes 0 ms as no limit.
milliseconds Remaining(absl::Time deadline) {
  const int64_t ms = absl::ToInt64Milliseconds(deadline - absl::Now());
  return milliseconds(std::clamp<int64_t>(ms, 1, 1000LL * 3600 * 24 * 365));
}

// Without the stack that libtorch appends.
std::string FirstLine(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

// Waiting beyond its timeout makes Gloo close all connections of the group, which the transfers
// that were not waited for then report.
bool IsTimeout(const std::string& text) {
  return absl::StrContains(text, "Timed out waiting") ||
         absl::StrContains(text, "Application timeout");
}

class GlooTransport : public Transport {
 public:
  explicit GlooTransport(GroupPtr group) : group_(std::move(group)) {}

  absl::StatusOr<std::unique_ptr<Transfer>> Send(int peer, uint32_t tag, const std::byte* data,
                                                 int64_t bytes) override {
    return Post(peer, const_cast<std::byte*>(data), bytes, [&](std::vector<at::Tensor>& tensors) {
      return group_->send(tensors, peer, static_cast<int>(tag));
    });
  }

  absl::StatusOr<std::unique_ptr<Transfer>> Receive(int peer, uint32_t tag, std::byte* data,
                                                    int64_t bytes) override {
    return Post(peer, data, bytes, [&](std::vector<at::Tensor>& tensors) {
      return group_->recv(tensors, peer, static_cast<int>(tag));
    });
  }

  void Interrupt() override {
    std::lock_guard<std::mutex> lock(mutex_);
    interrupted_ = true;
    for (c10d::Work* work : active_) {
      try {
        work->abort();
      } catch (const std::exception&) {
        // The transfer then ends at its deadline.
      }
    }
  }

  void Close() override { group_.reset(); }

 private:
  class WorkTransfer : public Transfer {
   public:
    WorkTransfer(GlooTransport* transport, c10::intrusive_ptr<c10d::Work> work, int peer)
        : transport_(transport), work_(std::move(work)), peer_(peer) {}
    ~WorkTransfer() override {
      std::lock_guard<std::mutex> lock(transport_->mutex_);
      transport_->active_.erase(work_.get());
    }

    absl::Status Wait(absl::Time deadline) override {
      // Gloo forgets an interruption once it has told of it.
      if (transport_->interrupted()) return absl::AbortedError("interrupted");
      try {
        if (work_->wait(Remaining(deadline))) return absl::OkStatus();
        return absl::AbortedError("interrupted");
      } catch (const std::exception& error) {
        return FromError(error, peer_);
      }
    }

   private:
    GlooTransport* const transport_;
    const c10::intrusive_ptr<c10d::Work> work_;
    const int peer_;
  };

  static absl::Status FromError(const std::exception& error, int peer) {
    const std::string text = FirstLine(error);
    return PeerError(
        IsTimeout(text) ? absl::StatusCode::kDeadlineExceeded : absl::StatusCode::kUnavailable,
        {peer}, absl::StrCat("peer ", peer, ": ", text));
  }

  bool interrupted() {
    std::lock_guard<std::mutex> lock(mutex_);
    return interrupted_;
  }

  template <typename Start>
  absl::StatusOr<std::unique_ptr<Transfer>> Post(int peer, std::byte* data, int64_t bytes,
                                                 Start start) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (interrupted_) return absl::AbortedError("interrupted");
    try {
      std::vector<at::Tensor> tensors = {at::from_blob(data, {bytes}, at::kByte)};
      c10::intrusive_ptr<c10d::Work> work = start(tensors);
      active_.insert(work.get());
      return std::make_unique<WorkTransfer>(this, std::move(work), peer);
    } catch (const std::exception& error) {
      return FromError(error, peer);
    }
  }

  GroupPtr group_;
  std::mutex mutex_;
  bool interrupted_ = false;      // guarded by mutex_
  std::set<c10d::Work*> active_;  // guarded by mutex_
};

class GlooFactory : public CommunicatorFactory {
 public:
  GlooFactory(StorePtr store, std::string prefix, std::string local_host)
      : store_(std::move(store)), prefix_(std::move(prefix)), local_host_(std::move(local_host)) {}

  absl::StatusOr<std::unique_ptr<Communicator>> Create(const GroupSpec& spec) override {
    RETURN_IF_ERROR(CheckGroupSpec(spec));
    const absl::Time deadline = absl::Now() + spec.setup_timeout;
    const std::string where = absl::StrCat("rank ", spec.rank, " of group \"", spec.name, "\" (",
                                           spec.size, " ranks), setup: ");
    auto store =
        c10::make_intrusive<c10d::PrefixStore>(absl::StrCat(prefix_, "/", spec.name), store_);
    RETURN_IF_ERROR(AwaitRanks(*store, spec, where, deadline));
    try {
      auto options = c10d::ProcessGroupGloo::Options::create(Remaining(deadline));
      options->threads = 1;  // they serve operations that are not used here
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(local_host_));
      auto group = c10::make_intrusive<c10d::ProcessGroupGloo>(store, spec.rank, spec.size,
                                                               std::move(options));
      return std::make_unique<HostCommunicator>(spec,
                                                std::make_unique<GlooTransport>(std::move(group)));
    } catch (const std::exception& error) {
      const std::string text =
          absl::StrCat(where, "cannot connect the ranks on ", local_host_, ": ", FirstLine(error));
      return absl::Now() >= deadline ? absl::DeadlineExceededError(text)
                                     : absl::UnavailableError(text);
    }
  }

 private:
  // Before Gloo connects, whose errors would not say who is missing.
  static absl::Status AwaitRanks(c10d::Store& store, const GroupSpec& spec,
                                 const std::string& where, absl::Time deadline) {
    std::vector<std::string> keys;
    for (int rank = 0; rank < spec.size; ++rank) keys.push_back(absl::StrCat("here/", rank));
    try {
      store.set(keys[spec.rank], std::vector<uint8_t>{1});
      try {
        store.wait(keys, Remaining(deadline));
        return absl::OkStatus();
      } catch (const std::exception& error) {
        std::vector<int> missing;
        for (int rank = 0; rank < spec.size; ++rank) {
          if (!store.check({keys[rank]})) missing.push_back(rank);
        }
        return PeerError(
            absl::StatusCode::kDeadlineExceeded, missing,
            absl::StrCat(where, "rank ", absl::StrJoin(missing, ", "), " did not come within ",
                         absl::FormatDuration(spec.setup_timeout)));
      }
    } catch (const std::exception& error) {
      return absl::UnavailableError(absl::StrCat(where, "lost the store: ", FirstLine(error)));
    }
  }

  const StorePtr store_;
  const std::string prefix_;
  const std::string local_host_;
};

struct Listener {
  int fd = -1;
  std::string host;
  int port = 0;
};

// The address a socket is bound to.
absl::StatusOr<Listener> Describe(int fd) {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("file descriptor ", fd, " is not a socket: ", std::strerror(errno)));
  }
  char text[INET6_ADDRSTRLEN] = "";
  Listener listener{.fd = fd};
  if (storage.ss_family == AF_INET) {
    const auto& address = reinterpret_cast<const sockaddr_in&>(storage);
    inet_ntop(AF_INET, &address.sin_addr, text, sizeof(text));
    listener.port = ntohs(address.sin_port);
  } else if (storage.ss_family == AF_INET6) {
    const auto& address = reinterpret_cast<const sockaddr_in6&>(storage);
    inet_ntop(AF_INET6, &address.sin6_addr, text, sizeof(text));
    listener.port = ntohs(address.sin6_port);
  } else {
    return absl::InvalidArgumentError(absl::StrCat("file descriptor ", fd, " is not a TCP socket"));
  }
  listener.host = text;
  return listener;
}

// c10d itself would listen on every interface.
absl::StatusOr<Listener> Listen(const std::string& host, int port) {
  sockaddr_storage storage{};
  socklen_t size = 0;
  auto& v4 = reinterpret_cast<sockaddr_in&>(storage);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(storage);
  if (port < 0 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("store port ", port, " is not from 0 to 65535"));
  }
  if (inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
    size = sizeof(v4);
  } else if (inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr) == 1) {
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(port);
    size = sizeof(v6);
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("store address \"", host, "\" is not an IP address such as 127.0.0.1"));
  }
  const int fd = socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  absl::Cleanup close_fd = [fd] { close(fd); };
  const int on = 1;
  if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      bind(fd, reinterpret_cast<sockaddr*>(&storage), size) != 0 || listen(fd, SOMAXCONN) != 0) {
    return absl::UnavailableError(
        absl::StrCat("the store cannot listen on ", host, ":", port, ": ", std::strerror(errno)));
  }
  ASSIGN_OR_RETURN(Listener listener, Describe(fd));
  std::move(close_fd).Cancel();
  return listener;
}

}  // namespace

struct TcpStore::Impl {
  c10::intrusive_ptr<c10d::TCPStore> store;
  std::string host;
  int port = 0;
};

TcpStore::TcpStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TcpStore::~TcpStore() = default;
const std::string& TcpStore::host() const { return impl_->host; }
int TcpStore::port() const { return impl_->port; }

absl::StatusOr<std::unique_ptr<TcpStore>> TcpStore::Serve(const Address& address) {
  Listener listener;
  if (address.listen_fd >= 0) {
    ASSIGN_OR_RETURN(listener, Describe(address.listen_fd));
  } else {
    ASSIGN_OR_RETURN(listener, Listen(address.host, address.port));
  }
  c10d::TCPStoreOptions options;
  options.port = listener.port;
  options.isServer = true;
  options.waitWorkers = false;
  options.masterListenFd = listener.fd;
  options.timeout = milliseconds(absl::ToInt64Milliseconds(kStoreTimeout));
  try {
    auto impl = std::make_unique<Impl>();
    impl->store = c10::make_intrusive<c10d::TCPStore>(listener.host, options);
    impl->host = listener.host;
    impl->port = listener.port;
    return absl::WrapUnique(new TcpStore(std::move(impl)));
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("cannot serve the store on ", listener.host, ":",
                                               listener.port, ": ", FirstLine(error)));
  }
}

absl::StatusOr<std::unique_ptr<TcpStore>> TcpStore::Connect(const std::string& host, int port,
                                                            absl::Duration timeout) {
  if (port < 1 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("store port ", port, " is not from 1 to 65535"));
  }
  c10d::TCPStoreOptions options;
  options.port = port;
  options.waitWorkers = false;
  options.timeout = Remaining(absl::Now() + timeout);
  try {
    auto impl = std::make_unique<Impl>();
    impl->store = c10::make_intrusive<c10d::TCPStore>(host, options);
    impl->host = host;
    impl->port = port;
    return absl::WrapUnique(new TcpStore(std::move(impl)));
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("cannot reach the store at ", host, ":", port,
                                               " within ", absl::FormatDuration(timeout), ": ",
                                               FirstLine(error)));
  }
}

absl::Status TcpStore::Set(const std::string& key, const std::string& value) {
  try {
    impl_->store->set(key, std::vector<uint8_t>(value.begin(), value.end()));
    return absl::OkStatus();
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("store: cannot set \"", key, "\": ", FirstLine(error)));
  }
}

absl::StatusOr<std::string> TcpStore::Get(const std::string& key, absl::Time deadline) {
  try {
    impl_->store->wait({key}, Remaining(deadline));
    const std::vector<uint8_t> value = impl_->store->get(key);
    return std::string(value.begin(), value.end());
  } catch (const std::exception& error) {
    const std::string text = absl::StrCat("store: no \"", key, "\": ", FirstLine(error));
    return absl::Now() >= deadline ? absl::DeadlineExceededError(text)
                                   : absl::UnavailableError(text);
  }
}

std::unique_ptr<CommunicatorFactory> MakeGlooFactory(const TcpStore& store, std::string prefix,
                                                     std::string local_host) {
  return std::make_unique<GlooFactory>(store.impl_->store, std::move(prefix),
                                       std::move(local_host));
}

}  // namespace dlo
