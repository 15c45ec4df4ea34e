// How the two ends of a WorkerLink between hosts reach and trust each other.
//
//   ASSIGN_OR_RETURN(const LinkTls tls, LoadLinkTls({"ca.pem", "cert.pem", "key.pem"}));
//   AddLinkPort(builder, "10.0.0.1:7070", tls, keepalive, &port);                 // dlo-serve
//   std::shared_ptr<grpc::Channel> channel = LinkChannel("10.0.0.1:7070", tls, keepalive);
//
// TLS in both directions: each end shows a certificate that the one CA has signed, and the server's
// names the host that the worker connects to. Whoever has such a certificate may attach, so the CA
// signs for nothing else. Pings tell both ends within `LinkKeepalive::bound` that the other is gone
// without a word. Stateless; any thread.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/server_builder.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace dlo {

struct LinkTlsFiles {
  std::string ca;    // PEM; one certificate or more
  std::string cert;  // PEM; the own one first, intermediate ones behind it
  std::string key;   // PEM, of the own certificate, without a passphrase
};

struct LinkTls {
  std::string ca_pem;
  std::string cert_pem;
  std::string key_pem;
};

// Reads and checks them. NOT_FOUND or PERMISSION_DENIED with the path; INVALID_ARGUMENT with it if
// a file is not what it must be, key and certificate do not belong together, the CA has not signed
// the certificate, or it is not valid now.
absl::StatusOr<LinkTls> LoadLinkTls(const LinkTlsFiles& files);

struct LinkKeepalive {
  absl::Duration interval = absl::Seconds(3);  // without traffic, until a ping
  absl::Duration timeout = absl::Seconds(5);   // for its answer

  absl::Duration bound() const { return interval + timeout; }
};

// `port` is the one that was chosen once the server has started, 0 if it cannot be bound.
void AddLinkPort(grpc::ServerBuilder& builder, const std::string& address, const LinkTls& tls,
                 const LinkKeepalive& keepalive, int* port);

std::shared_ptr<grpc::Channel> LinkChannel(const std::string& address, const LinkTls& tls,
                                           const LinkKeepalive& keepalive);

// From now on gRPC's own errors, among them why a TLS handshake failed, go to our log.
void RouteGrpcLog();

}  // namespace dlo
