// Communicators between processes on host memory: Gloo's connections, as shipped inside libtorch,
// found through c10d's TCP store.
//
//   // rank 0 of the world
//   ASSIGN_OR_RETURN(auto store, TcpStore::Serve({.host = "127.0.0.1"}));       // any free port
//   // other ranks
//   ASSIGN_OR_RETURN(auto store, TcpStore::Connect("127.0.0.1", port, absl::Seconds(30)));
//   std::unique_ptr<CommunicatorFactory> factory = MakeGlooFactory(*store, "run-7", "127.0.0.1");
//   ASSIGN_OR_RETURN(auto weights, factory->Create({.name = "weights/0", .rank = 0, .size = 4}));
//
// A peer that is killed surfaces within milliseconds as UNAVAILABLE, one that is stopped at the
// operation's deadline. The process that serves the store must live until all groups are connected;
// established groups do not need it.
//
// The store listens on one address only; neither it nor Gloo authenticates, so across hosts it
// needs a private network. While a stopped (not killed) process serves the store, Get may outlast
// its deadline.
//
// Thread-safe, but for a communicator as in runtime/communicator.h. A factory and its communicators
// keep the store's connection themselves; the TcpStore may go.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "runtime/communicator.h"

namespace dlo {

class TcpStore : public RendezvousStore {
 public:
  struct Address {
    std::string host = "127.0.0.1";  // an IP address of this machine to listen on
    int port = 0;                    // 0: any free one
    // If not negative, an inherited socket that listens already; host and port are then its own.
    // The store owns it, from success on.
    int listen_fd = -1;
  };

  // INVALID_ARGUMENT for an address that cannot be, UNAVAILABLE for one that cannot be had.
  static absl::StatusOr<std::unique_ptr<TcpStore>> Serve(const Address& address);

  // Waits for the server until the timeout. UNAVAILABLE names the address.
  static absl::StatusOr<std::unique_ptr<TcpStore>> Connect(const std::string& host, int port,
                                                           absl::Duration timeout);

  ~TcpStore() override;

  const std::string& host() const;
  int port() const;

  absl::Status Set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> Get(const std::string& key, absl::Time deadline) override;

 private:
  friend std::unique_ptr<CommunicatorFactory> MakeGlooFactory(const TcpStore&, std::string,
                                                              std::string);
  struct Impl;
  explicit TcpStore(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

// `prefix` sets apart the runs that share a store. Connections are made on the interface that has
// `local_host`, an address of this machine which the peers can reach.
std::unique_ptr<CommunicatorFactory> MakeGlooFactory(const TcpStore& store, std::string prefix,
                                                     std::string local_host);

}  // namespace dlo
