#include "proto/link_channel.h"

#include <grpc/support/log.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/support/channel_arguments.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>
#include <spdlog/spdlog.h>

#include <cerrno>
#include <fstream>
#include <sstream>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"

namespace dlo {
namespace {

constexpr int64_t kPemBytesMax = 1 << 20;

template <typename T, void (*Free)(T*)>
struct Deleter {
  void operator()(T* object) const { Free(object); }
};
using Certificate = std::unique_ptr<X509, Deleter<X509, X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Deleter<EVP_PKEY, EVP_PKEY_free>>;
using Store = std::unique_ptr<X509_STORE, Deleter<X509_STORE, X509_STORE_free>>;
using StoreContext = std::unique_ptr<X509_STORE_CTX, Deleter<X509_STORE_CTX, X509_STORE_CTX_free>>;

struct BioDeleter {
  void operator()(BIO* bio) const { BIO_free(bio); }
};
using Bio = std::unique_ptr<BIO, BioDeleter>;

Bio ReaderOf(const std::string& pem) {
  return Bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

absl::StatusOr<std::string> ReadPem(const std::string& path) {
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  if (!in) return absl::ErrnoToStatus(errno, absl::StrCat("cannot read ", path));
  std::string text(kPemBytesMax, '\0');
  in.read(text.data(), kPemBytesMax);
  text.resize(in.gcount());
  if (text.empty()) return absl::InvalidArgumentError(absl::StrCat(path, " is empty"));
  return text;
}

absl::StatusOr<std::vector<Certificate>> ParseCertificates(const std::string& path,
                                                           const std::string& pem) {
  const Bio reader = ReaderOf(pem);
  std::vector<Certificate> all;
  while (X509* certificate = PEM_read_bio_X509(reader.get(), nullptr, nullptr, nullptr)) {
    all.emplace_back(certificate);
  }
  ERR_clear_error();
  if (all.empty()) return absl::InvalidArgumentError(absl::StrCat(path, " holds no certificate"));
  return all;
}

absl::Status CheckKey(const LinkTlsFiles& files, const LinkTls& tls, const Certificate& own) {
  const Bio reader = ReaderOf(tls.key_pem);
  // Nobody is there to type a passphrase.
  const auto no_passphrase = +[](char*, int, int, void*) { return -1; };
  const Key key(PEM_read_bio_PrivateKey(reader.get(), nullptr, no_passphrase, nullptr));
  const bool fits = key != nullptr && X509_check_private_key(own.get(), key.get()) == 1;
  ERR_clear_error();
  if (key == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(files.key, " holds no private key (one with a passphrase cannot be used)"));
  }
  if (fits) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(files.key, " is not the key of the certificate ", files.cert));
}

absl::Status CheckSignature(const LinkTlsFiles& files, const std::vector<Certificate>& cas,
                            const std::vector<Certificate>& chain) {
  const Store store(X509_STORE_new());
  for (const Certificate& ca : cas) X509_STORE_add_cert(store.get(), ca.get());
  const StoreContext context(X509_STORE_CTX_new());
  STACK_OF(X509)* const between = sk_X509_new_null();
  for (size_t i = 1; i < chain.size(); ++i) sk_X509_push(between, chain[i].get());
  X509_STORE_CTX_init(context.get(), store.get(), chain[0].get(), between);
  const bool valid = X509_verify_cert(context.get()) == 1;
  const std::string why = X509_verify_cert_error_string(X509_STORE_CTX_get_error(context.get()));
  sk_X509_free(between);
  ERR_clear_error();
  if (valid) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the certificate ", files.cert, " does not stand before the CA ", files.ca, ": ", why));
}

int Milliseconds(absl::Duration duration) {
  return static_cast<int>(absl::ToInt64Milliseconds(duration));
}

void LogFromGrpc(gpr_log_func_args* args) {
  const absl::string_view text = args->message;
  // TLS is spoken on no other port and channel of ours.
  const char* const what = absl::StrContains(text, "andshake") ? "worker link, TLS" : "gRPC";
  switch (args->severity) {
    case GPR_LOG_SEVERITY_ERROR:
      spdlog::error("{}: {}", what, args->message);
      break;
    case GPR_LOG_SEVERITY_INFO:
      spdlog::info("{}: {}", what, args->message);
      break;
    case GPR_LOG_SEVERITY_DEBUG:
      spdlog::debug("{}: {}", what, args->message);
      break;
  }
}

}  // namespace

absl::StatusOr<LinkTls> LoadLinkTls(const LinkTlsFiles& files) {
  LinkTls tls;
  ASSIGN_OR_RETURN(tls.ca_pem, ReadPem(files.ca));
  ASSIGN_OR_RETURN(tls.cert_pem, ReadPem(files.cert));
  ASSIGN_OR_RETURN(tls.key_pem, ReadPem(files.key));
  ASSIGN_OR_RETURN(const std::vector<Certificate> cas, ParseCertificates(files.ca, tls.ca_pem));
  ASSIGN_OR_RETURN(const std::vector<Certificate> chain,
                   ParseCertificates(files.cert, tls.cert_pem));
  RETURN_IF_ERROR(CheckKey(files, tls, chain[0]));
  RETURN_IF_ERROR(CheckSignature(files, cas, chain));
  return tls;
}

void AddLinkPort(grpc::ServerBuilder& builder, const std::string& address, const LinkTls& tls,
                 const LinkKeepalive& keepalive, int* port) {
  grpc::SslServerCredentialsOptions options(
      GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = tls.ca_pem;
  options.pem_key_cert_pairs = {{tls.key_pem, tls.cert_pem}};
  builder.AddListeningPort(address, grpc::SslServerCredentials(options), port);
  // With it a second server would share the port in silence.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(keepalive.interval));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Milliseconds(keepalive.timeout));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // The worker's own pings are welcome at any rate.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 100);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
}

std::shared_ptr<grpc::Channel> LinkChannel(const std::string& address, const LinkTls& tls,
                                           const LinkKeepalive& keepalive) {
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = tls.ca_pem;
  options.pem_cert_chain = tls.cert_pem;
  options.pem_private_key = tls.key_pem;
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(keepalive.interval));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Milliseconds(keepalive.timeout));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // An attempt that nobody answers is given up and repeated after seconds, not minutes.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 200);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  // A proxy for the web is none for the link.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(address, grpc::SslCredentials(options), arguments);
}

void RouteGrpcLog() {
  gpr_set_log_function(LogFromGrpc);
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
}

}  // namespace dlo
