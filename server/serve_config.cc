#include "server/serve_config.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <ostream>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/config.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/topology.h"
#include "loader/hwr/store.h"
#include "loader/model_path.h"
#include "models/host_weight_identity.h"
#include "models/model_files.h"
#include "models/model_startup.h"
#include "proto/build_id.h"
#include "server/reference_flags.h"

namespace dlo {
namespace {

constexpr char kConfigVariable[] = "DLO_CONFIG";
// Linux keeps the path of a unix socket in 108 bytes, the last of them zero.
constexpr size_t kSocketPathBytesMax = 107;

// Where what a user's programs keep belongs, by the XDG base directory specification.
std::string DefaultDataDir(const std::map<std::string, std::string>& environment) {
  const auto state = environment.find("XDG_STATE_HOME");
  // A relative path there is to be passed over.
  if (state != environment.end() && absl::StartsWith(state->second, "/")) {
    return state->second + "/dlo";
  }
  return "~/.local/state/dlo";
}

ConfigSchema ServeSchema(const std::string& default_model, const std::string& default_data_dir) {
  return {
      {.key = "model.path",
       .type = ConfigType::kPathOrName,
       .flag = "--model",
       .fallback = default_model,
       .help = "folder of a diffusers repository, or a Hugging Face id in the local cache"},
      {.key = "model.dtype",
       .flag = "--dtype",
       .fallback = "auto",
       .allowed = {"auto", "float32", "bfloat16"},
       .help = "of transformer and text encoder; auto is bfloat16 on cuda, float32 on cpu"},
      {.key = "model.quantization",
       .flag = "--quantization",
       .fallback = "none",
       .allowed = {"none", "fp8"},
       .help =
           "of the linear layers in the transformers' blocks, while they are loaded; fp8: 8-bit "
           "floats with a scale for each layer"},
      {.key = "device",
       .flag = "--device",
       .fallback = "cpu",
       .allowed = {"cpu", "cuda"},
       .help = "where the model runs"},
      {.key = "listen",
       .flag = "--listen",
       .fallback = "127.0.0.1:50051",
       .help = "gRPC address, HOST:PORT (port 0: any free one) or unix:/PATH"},
      {.key = "metrics_listen",
       .flag = "--metrics-listen",
       .fallback = "",
       .help =
           "Prometheus metrics at http://HOST:PORT/metrics (port 0: any free one); empty: none"},
      {.key = "data_dir",
       .type = ConfigType::kPath,
       .flag = "--data-dir",
       .fallback = default_data_dir,
       .help = "folder of jobs and their results, for one server at a time"},
      {.key = "parallel.dp",
       .type = ConfigType::kInt,
       .flag = "--dp",
       .fallback = "1",
       .min = 1,
       .max = Topology::kWorldSizeMax,
       .help = "replicas (data parallel degree): workers that each run a request of their own"},
      {.key = "parallel.sp",
       .type = ConfigType::kInt,
       .flag = "--sp",
       .fallback = "1",
       .min = 1,
       .help = "sequence parallel degree"},
      {.key = "parallel.tp",
       .type = ConfigType::kInt,
       .flag = "--tp",
       .fallback = "1",
       .min = 1,
       .help = "tensor parallel degree"},
      {.key = "parallel.cfg",
       .type = ConfigType::kInt,
       .flag = "--cfg",
       .fallback = "1",
       .min = 1,
       .max = 2,
       .help = "devices that share the branches of guidance"},
      {.key = "offload.transfer",
       .flag = "--transfer",
       .fallback = "none",
       .allowed = {"none", "allgather", "rank-local"},
       .help = "how blocks reach the device; none: all of them stay there"},
      {.key = "offload.resident_layers",
       .type = ConfigType::kInt,
       .flag = "--resident-layers",
       .fallback = "0",
       .allowed = {"auto"},
       .help = "leading blocks of a transformer that stay on the device while the others are "
               "streamed; auto: as many as fit under offload.device_memory_limit"},
      {.key = "offload.slots",
       .type = ConfigType::kInt,
       .flag = "--slots",
       .fallback = "2",
       .min = 2,
       .max = 64,
       .help = "device buffers, one block each, for streamed blocks"},
      {.key = "offload.device_memory_limit",
       .type = ConfigType::kBytes,
       .flag = "--device-memory-limit",
       .fallback = "0",
       .help = "device memory that resident_layers auto fills; 0: none given"},
      {.key = "offload.host_memory_limit",
       .type = ConfigType::kBytes,
       .flag = "--host-memory-limit",
       .fallback = "0",
       .help = "host memory that the streamed blocks of all ranks on this host may take; 0: no "
               "limit"},
      {.key = "host_weights.checkpoint_mmap",
       .flag = "--checkpoint-mmap",
       .fallback = "auto",
       .allowed = {"auto", "on", "off"},
       .help = "whether blocks that are streamed whole stay in the checkpoint's pages, which "
               "workers share; auto: if they are stored as they run; on: else fail"},
      {.key = "host_weights.mode",
       .flag = "--host-weights-mode",
       .fallback = "disabled",
       .allowed = {"disabled", "preferred", "required"},
       .help = "with rank-local transfer: whether weights come from a store of artifacts that hold "
               "them as they run; preferred: if it has them, else they are loaded as usual and "
               "stored; required: else fail"},
      {.key = "host_weights.root",
       .type = ConfigType::kPath,
       .flag = "--host-weights-root",
       .fallback = "",
       .help =
           "folder of that store, on a disk of the host, for one user; made if it is not there"},
      {.key = "host_weights.validation",
       .flag = "--host-weights-validation",
       .fallback = "metadata",
       .allowed = {"metadata", "full"},
       .help = "how much of an artifact is looked at before it is used; full: every byte, once a "
               "boot"},
      {.key = "host_weights.max_store_bytes",
       .type = ConfigType::kBytes,
       .flag = "--host-weights-max-store-bytes",
       .fallback = "0",
       .help = "what the store may hold; beyond it the artifacts used least recently are removed; "
               "0: what it was made with"},
      {.key = "host_weights.min_free_bytes",
       .type = ConfigType::kBytes,
       .flag = "--host-weights-min-free-bytes",
       .fallback = "0",
       .help = "what an artifact must leave free on the store's disk; 0: what it was made with"},
      {.key = "host_weights.wait",
       .type = ConfigType::kDuration,
       .flag = "--host-weights-wait",
       .fallback = "10m",
       .help = "how long a start waits for other processes' locks on the store"},
      {.key = "queue.max_waiting",
       .type = ConfigType::kInt,
       .flag = "--max-waiting",
       .fallback = "64",
       .min = 0,
       .max = 100000,
       .help = "requests that may wait; more are refused with RESOURCE_EXHAUSTED"},
      {.key = "wave.max_wait",
       .type = ConfigType::kDuration,
       .flag = "--wave-max-wait",
       .fallback = "500ms",
       .help = "how long the first request of a wave waits for others that may run with it; "
               "replicas that share no weights run each request on its own and never wait"},
      {.key = "wave.compatibility",
       .flag = "--wave-compatibility",
       .fallback = "strict",
       .allowed = {"strict", "schedule"},
       .help = "who may share a wave; strict: requests whose settings are equal but for the seed; "
               "schedule: all that walk the blocks alike, so that the fast wait for the slow"},
      {.key = "wave.stall_timeout",
       .type = ConfigType::kDuration,
       .flag = "--wave-stall-timeout",
       .fallback = "10m",
       .help = "a worker that gets no further for so long (stages, steps, frames) is restarted; "
               "longer than any single step takes"},
      {.key = "wave.stuck_factor",
       .type = ConfigType::kInt,
       .flag = "--wave-stuck-factor",
       .fallback = "50",
       .min = 0,
       .max = 1000000,
       .help = "with streamed blocks: a worker that stays in a visit for so many times the median "
               "of its wave and stage is restarted; 0: never for that"},
      {.key = "wave.stuck_floor",
       .type = ConfigType::kDuration,
       .flag = "--wave-stuck-floor",
       .fallback = "1m",
       .help = "the least time in a visit before that"},
      {.key = "jobs.result_ttl",
       .type = ConfigType::kDuration,
       .flag = "--result-ttl",
       .fallback = "24h",
       .help = "how long an ended job and its result are kept"},
      {.key = "jobs.result_bytes_max",
       .type = ConfigType::kBytes,
       .flag = "--result-bytes-max",
       .fallback = "10GiB",
       .help = "room for results; beyond it the oldest are removed before their time"},
      {.key = "shutdown.grace",
       .type = ConfigType::kDuration,
       .flag = "--shutdown-grace",
       .fallback = "5m",
       .help = "how long a running request may take to finish after SIGTERM"},
      {.key = "worker.threads",
       .type = ConfigType::kInt,
       .flag = "--threads",
       .fallback = "0",
       .max = 4096,
       .help = "CPU threads that compute in a worker; 0: the cores divided by the workers"},
      {.key = "worker.remote_ranks",
       .type = ConfigType::kInt,
       .flag = "--remote-ranks",
       .fallback = "0",
       .min = 0,
       .max = Topology::kWorldSizeMax,
       .help = "how many ranks, the last ones, have their workers on other hosts, where they are "
               "started with dlo-worker --connect"},
      {.key = "worker.listen",
       .flag = "--worker-listen",
       .fallback = "",
       .help = "address at which workers of other hosts attach, HOST:PORT (port 0: any free one)"},
      {.key = "worker.tls_ca",
       .type = ConfigType::kPath,
       .flag = "--worker-tls-ca",
       .fallback = "",
       .help = "PEM file: the CA of the certificates on both sides, which signs for nothing else"},
      {.key = "worker.tls_cert",
       .type = ConfigType::kPath,
       .flag = "--worker-tls-cert",
       .fallback = "",
       .help = "PEM file: the server's certificate, for the host that workers connect to"},
      {.key = "worker.tls_key",
       .type = ConfigType::kPath,
       .flag = "--worker-tls-key",
       .fallback = "",
       .help = "PEM file: its private key, without a passphrase"},
      {.key = "log.level",
       .flag = "--log-level",
       .fallback = "info",
       .allowed = LogLevels(),
       .help = "least level that is logged"},
  };
}

// Empty if `address` is HOST:PORT, else what it must be, which `forms` says.
std::string HostPortProblem(const std::string& address, const std::string& forms) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0) return forms;
  const std::string host = address.substr(0, colon);
  const bool bracketed =
      absl::StartsWith(host, "[") && absl::EndsWith(host, "]") && host.size() > 2;
  // An IPv6 address without brackets leaves open where the port starts.
  if (!bracketed && host.find_first_of(":[]/, ") != std::string::npos) return forms;
  const std::string port = address.substr(colon + 1);
  int number = 0;
  if (port.empty() || port.find_first_not_of("0123456789") != std::string::npos ||
      !absl::SimpleAtoi(port, &number) || number > 65535) {
    return absl::StrCat(forms, ", with a port from 0 to 65535");
  }
  return "";
}

// Empty if `address` is one that gRPC can listen on, else what it must be.
std::string ListenProblem(const std::string& address) {
  if (absl::StartsWith(address, "unix:")) {
    const std::string path = address.substr(5);
    if (!absl::StartsWith(path, "/")) return "unix:/PATH with an absolute path";
    if (path.size() > kSocketPathBytesMax) {
      return absl::StrCat("unix:/PATH with at most ", kSocketPathBytesMax, " bytes in the path");
    }
    return "";
  }
  return HostPortProblem(address,
                         "HOST:PORT such as 127.0.0.1:50051 or [::1]:50051, or unix:/PATH");
}

ParallelConfig ParallelOf(const Config& config) {
  const auto degree = [&](const char* key) { return static_cast<int>(config.Int(key)); };
  return {.dp = degree("parallel.dp"),
          .tp = degree("parallel.tp"),
          .ulysses = degree("parallel.sp"),
          .cfg = degree("parallel.cfg")};
}

// The schema allows no other names.
WeightTransfer TransferOf(const Config& config) {
  return *ParseWeightTransfer(config.String("offload.transfer"));
}

// The rules of base/topology, with the origin of each setting that a line names.
std::vector<std::string> FindCombinationProblems(const Config& config) {
  const ParallelConfig parallel = ParallelOf(config);
  absl::Status status = CheckCombination(
      parallel, {.transfer = TransferOf(config),
                 .resident_layers = static_cast<int>(config.Int("offload.resident_layers"))});
  if (status.ok()) status = CheckAvailable(parallel);
  if (status.ok()) return {};
  std::vector<std::string> problems = absl::StrSplit(absl::string_view(status.message()), '\n');
  for (std::string& problem : problems) {
    std::vector<std::string> origins;
    for (const char* key : {"parallel.dp", "parallel.tp", "parallel.sp", "parallel.cfg",
                            "offload.transfer", "offload.resident_layers"}) {
      if (!config.IsDefault(key) && absl::StrContains(problem, config.FlagOf(key) + " ")) {
        origins.push_back(absl::StrCat(key, " from ", config.OriginText(key)));
      }
    }
    if (!origins.empty()) absl::StrAppend(&problem, " (", absl::StrJoin(origins, ", "), ")");
  }
  return problems;
}

constexpr const char* kRemoteKeys[] = {"worker.listen", "worker.tls_ca", "worker.tls_cert",
                                       "worker.tls_key"};

// Of the keys for workers on other hosts: all or none.
void FindRemoteProblems(
    const Config& config,
    const std::function<void(const std::string&, const std::string&, const std::string&)>& add) {
  const int64_t remote = config.Int("worker.remote_ranks");
  const int64_t ranks = config.Int("parallel.dp") * config.Int("parallel.sp") *
                        config.Int("parallel.tp") * config.Int("parallel.cfg");
  if (remote > ranks) {
    add("worker.remote_ranks", absl::StrCat(remote),
        absl::StrCat("there are only ", ranks, " ranks; lower it, or raise parallel.dp"));
  }
  for (const std::string key : kRemoteKeys) {
    const bool empty =
        key == "worker.listen" ? config.String(key).empty() : config.Path(key).empty();
    if (remote > 0 && empty) {
      add(key, "empty",
          absl::StrCat("worker.remote_ranks is ", remote,
                       "; set it, as worker.listen and worker.tls_ca, _cert and _key belong "
                       "together, or set worker.remote_ranks to 0"));
    } else if (remote == 0 && !empty) {
      add(key, key == "worker.listen" ? config.String(key) : config.Path(key).string(),
          "worker.remote_ranks is 0, so no worker attaches from another host; set that, or leave "
          "this empty");
    }
  }
  if (remote > 0 && config.String("offload.transfer") == "allgather") {
    add("worker.remote_ranks", absl::StrCat(remote),
        "workers that share their weights (offload.transfer allgather) must be on this host in "
        "this version; set offload.transfer to rank-local or none, or worker.remote_ranks to 0");
  }
  const std::string& listen = config.String("worker.listen");
  const bool unix_socket = absl::StartsWith(listen, "unix:");
  if (!listen.empty() && (unix_socket || !ListenProblem(listen).empty())) {
    add("worker.listen", absl::StrCat("\"", listen, "\""),
        "must be HOST:PORT such as 10.0.0.1:7070 or [::]:7070");
  }
}

// What the schema cannot say about one key. Each problem names key, value, origin and way out.
std::vector<std::string> FindProblems(const Config& config) {
  std::vector<std::string> problems;
  const auto add = [&](const std::string& key, const std::string& value, const std::string& rest) {
    problems.push_back(
        absl::StrCat(key, " is ", value, " (", config.OriginText(key), "), but ", rest));
  };
  const std::string& listen = config.String("listen");
  if (const std::string must_be = ListenProblem(listen); !must_be.empty()) {
    add("listen", absl::StrCat("\"", listen, "\""), absl::StrCat("must be ", must_be));
  }
  if (const std::string& metrics = config.String("metrics_listen"); !metrics.empty()) {
    const std::string must_be =
        HostPortProblem(metrics, "HOST:PORT such as 127.0.0.1:9464 or [::1]:9464");
    const std::string shown = absl::StrCat("\"", metrics, "\"");
    if (!must_be.empty()) {
      add("metrics_listen", shown, absl::StrCat("must be ", must_be, "; or empty for no metrics"));
    } else if (metrics == listen && !absl::EndsWith(metrics, ":0")) {
      add("metrics_listen", shown, "gRPC listens there (listen); choose another port");
    }
  }
  for (std::string& problem : FindCombinationProblems(config)) {
    problems.push_back(std::move(problem));
  }
  if (config.Duration("wave.stall_timeout") <= absl::ZeroDuration()) {
    add("wave.stall_timeout", "0", "every wave would be overdue at once; set it to 10m");
  }
  if (config.Duration("wave.stuck_floor") < absl::Seconds(5)) {
    add("wave.stuck_floor", absl::FormatDuration(config.Duration("wave.stuck_floor")),
        "heartbeats come each second, so less than 5s says nothing; set it to 1m");
  }
  FindRemoteProblems(config, add);
  const std::string data_dir = config.Path("data_dir").string();
  if (config.IsDefault("data_dir") && absl::StrContains(data_dir, "/~/")) {
    add("data_dir", data_dir, "HOME is not set; set --data-dir or data_dir to a folder");
  }
  if (config.Bytes("jobs.result_bytes_max") == 0) {
    add("jobs.result_bytes_max", "0", "no video has room in it; set it to at least a few MiB");
  }
  const std::string& transfer = config.String("offload.transfer");
  if (config.Int("offload.resident_layers") == kResidentLayersAuto &&
      config.Bytes("offload.device_memory_limit") == 0) {
    add("offload.resident_layers", "auto",
        "there is no offload.device_memory_limit to fill; set it, or a number of layers");
  }
  if (config.String("host_weights.checkpoint_mmap") == "on") {
    if (transfer == "none") {
      add("host_weights.checkpoint_mmap", "on",
          "with offload.transfer none nothing is streamed; set it to auto");
    } else if (transfer == "allgather" && config.Int("parallel.dp") > 1) {
      add("host_weights.checkpoint_mmap", "on",
          "with offload.transfer allgather each worker holds its shards in memory of its own; set "
          "it to auto");
    }
  }
  if (config.String("model.quantization") != "none") {
    const std::string& quantization = config.String("model.quantization");
    if (config.String("host_weights.checkpoint_mmap") == "on") {
      add("model.quantization", quantization,
          "host_weights.checkpoint_mmap is on: the weights that run are not those of the "
          "checkpoint; set that to auto, or this to none");
    }
    if (config.String("device") == "cuda" && config.String("model.dtype") == "float32") {
      add("model.quantization", quantization,
          "cuda multiplies such weights in bfloat16 only; set model.dtype to bfloat16, or this to "
          "none");
    }
  }
  const std::string& mode = config.String("host_weights.mode");
  if (mode != "disabled") {
    if (config.Path("host_weights.root").empty()) {
      add("host_weights.mode", mode,
          "there is no store to look into; set host_weights.root to its folder, or the mode to "
          "disabled");
    }
    if (config.String("host_weights.checkpoint_mmap") == "on") {
      add("host_weights.checkpoint_mmap", "on",
          absl::StrCat("host_weights.mode is ", mode,
                       ", where weights come from artifacts or are loaded to make them; set it to "
                       "auto"));
    }
  }
  if (transfer == "none" && config.Int("offload.slots") != 2) {
    add("offload.slots", absl::StrCat(config.Int("offload.slots")),
        "with offload.transfer none there are no slots; leave it at 2");
  }
  return problems;
}

// Why the store of host weights is not used although there is a mode for it; else empty.
std::string UnusedStore(const ServeConfig& config) {
  const absl::StatusOr<Topology> topology = Topology::Create({.dp = config.parallel.dp});
  if (config.host_weights.mode == hwr::Mode::kDisabled || !topology.ok()) return "";
  const WeightTransfer transfer = topology->EffectiveTransfer(config.offload.transfer);
  if (transfer == WeightTransfer::kRankLocal) return "";
  return absl::StrCat("host_weights.mode is ", hwr::ModeName(config.host_weights.mode),
                      ", but with offload.transfer ", WeightTransferName(transfer),
                      " workers use no artifacts and leave the store alone");
}

// What a start would do with the store of host weights.
enum class StoreUse { kRestores, kPublishes, kNothing };

// Says whether the store has the model's artifact and what a start would do. Changes nothing there.
absl::StatusOr<StoreUse> CheckStore(const ServeConfig& config, const std::filesystem::path& root,
                                    std::ostream& out) {
  const ServeConfig::HostWeights& settings = config.host_weights;
  out << "host weights: mode " << std::string(hwr::ModeName(settings.mode)) << ", store "
      << settings.root.string() << "\n";
  const absl::Time deadline = absl::Now() + settings.wait;
  hwr::Store::OpenResult opened =
      hwr::Store::Open(StoreOptionsOf({.root = settings.root,
                                       .max_store_bytes = settings.max_store_bytes,
                                       .min_free_bytes = settings.min_free_bytes,
                                       .wait = settings.wait},
                                      /*read_only=*/true));
  hwr::Failure failure;
  bool publishes = false;
  std::string artifact = "an artifact";
  if (const auto* store = std::get_if<std::unique_ptr<hwr::Store>>(&opened)) {
    const hwr::DigestCache digests = (*store)->digests(deadline);
    ASSIGN_OR_RETURN(const HostWeightArtifact wanted,
                     DescribeHostWeights(root, {.dtype = config.model.dtype,
                                                .quantization = config.model.quantization,
                                                .from_hub = root.string() != config.model.path,
                                                .cache = &digests}));
    artifact = absl::StrCat("artifact ", wanted.identity.key);
    const hwr::LookupResult found = (*store)->Lookup(
        wanted.identity, {.validation = settings.validation, .deadline = deadline});
    if (found.lease) {
      out << "host weights: " << artifact << " is there, "
          << absl::StrFormat("%.1f MB", static_cast<double>(found.lease->bytes()) / 1e6)
          << "; a start reads no weights from the checkpoint\n";
      return StoreUse::kRestores;
    }
    failure = found.failure;
    publishes =
        found.status == hwr::LookupStatus::kMiss || found.status == hwr::LookupStatus::kInvalid;
  } else {
    failure = std::get<hwr::Failure>(opened);
    publishes = failure.reason == hwr::Reason::kNotFound;  // there need be no store yet
  }
  const bool survives = publishes || failure.retryable();
  if (settings.mode == hwr::Mode::kRequired || !survives) return failure.ToStatus();
  out << "host weights: " << failure.Text() << "; a start loads the checkpoint and stores "
      << (publishes ? artifact : "nothing") << "\n";
  return publishes ? StoreUse::kPublishes : StoreUse::kNothing;
}

ServeConfig ToServeConfig(const Config& config) {
  ServeConfig serve;
  serve.device = config.String("device");
  const std::string& dtype = config.String("model.dtype");
  const bool bfloat16 = dtype == "auto" ? serve.device == "cuda" : dtype == "bfloat16";
  serve.model.dtype = bfloat16 ? DType::kBF16 : DType::kF32;
  // One of the allowed values.
  serve.model.quantization = *ParseOnlineQuantization(config.String("model.quantization"));
  serve.model.path = config.PathOrName("model.path");
  serve.listen = config.String("listen");
  serve.metrics_listen = config.String("metrics_listen");
  serve.data_dir = config.Path("data_dir");
  const auto integer = [&](const char* key) { return static_cast<int>(config.Int(key)); };
  serve.parallel = {.dp = integer("parallel.dp"),
                    .sp = integer("parallel.sp"),
                    .tp = integer("parallel.tp"),
                    .cfg = integer("parallel.cfg")};
  serve.offload = {.transfer = TransferOf(config),
                   .resident_layers = integer("offload.resident_layers"),
                   .slots = integer("offload.slots"),
                   .device_memory_limit_bytes = config.Bytes("offload.device_memory_limit"),
                   .host_memory_limit_bytes = config.Bytes("offload.host_memory_limit")};
  // One of the allowed values.
  serve.host_weights.checkpoint_mmap =
      *ParseCheckpointMmap(config.String("host_weights.checkpoint_mmap"));
  serve.host_weights.mode = *hwr::ParseMode(config.String("host_weights.mode"));
  serve.host_weights.root = config.Path("host_weights.root");
  serve.host_weights.validation = *hwr::ParseValidation(config.String("host_weights.validation"));
  serve.host_weights.max_store_bytes = config.Bytes("host_weights.max_store_bytes");
  serve.host_weights.min_free_bytes = config.Bytes("host_weights.min_free_bytes");
  serve.host_weights.wait = config.Duration("host_weights.wait");
  serve.wave = {.max_wait = config.Duration("wave.max_wait"),
                .compatibility = config.String("wave.compatibility") == "schedule"
                                     ? WaveCompatibility::kSchedule
                                     : WaveCompatibility::kStrict,
                .stall_timeout = config.Duration("wave.stall_timeout"),
                .stuck_factor = integer("wave.stuck_factor"),
                .stuck_floor = config.Duration("wave.stuck_floor")};
  serve.queue_max_waiting = integer("queue.max_waiting");
  serve.jobs_result_ttl = config.Duration("jobs.result_ttl");
  serve.jobs_result_bytes_max = config.Bytes("jobs.result_bytes_max");
  serve.shutdown_grace = config.Duration("shutdown.grace");
  serve.worker_threads = integer("worker.threads");
  serve.remote = {
      .ranks = integer("worker.remote_ranks"),
      .listen = config.String("worker.listen"),
      .tls = {config.Path("worker.tls_ca").string(), config.Path("worker.tls_cert").string(),
              config.Path("worker.tls_key").string()}};
  serve.log_level = config.String("log.level");
  return serve;
}

struct CommandLine {
  ReferenceFlags reference;
  bool check = false;
  bool print_config = false;
  std::optional<std::string> config_file;
  std::map<std::string, std::string> flags;
  std::map<std::string, std::string> flags_as_written;
  std::string text;  // of --help or --version; empty: neither
};

std::string FlagHelp(const ConfigKey& key) {
  return absl::StrCat(
      key.help, key.allowed.empty() ? "" : absl::StrCat("; ", absl::StrJoin(key.allowed, ", ")),
      " [", key.key, ", ", key.environment_name(), "]",
      key.fallback.empty() ? "" : absl::StrCat(" (", key.fallback, ")"));
}

absl::Status ParseCommandLine(int argc, const char* const* argv, const ConfigSchema& schema,
                              CommandLine* result) {
  CommandLine& line = *result;
  CLI::App app(
      "Serves a text-to-video model over gRPC. Without --config and --model: the demo model.\n"
      "A flag beats the environment, the environment the file, the file the default.",
      "dlo-serve");
  app.set_version_flag("--version", BuildId());
  // Unknown flags are answered with the nearest known one, below.
  app.allow_extras();
  app.require_subcommand(0, 1);
  app.fallthrough();

  std::string config_file;
  CLI::Option* config_option =
      app.add_option("--config", config_file, absl::StrCat("YAML file [", kConfigVariable, "]"))
          ->type_name("FILE");
  bool print_config = false;
  app.add_flag("--print-config", print_config,
               "print each effective value and where it came from, and exit");
  std::vector<std::string> known = {"--config", "--print-config", "--help", "--version"};
  std::vector<std::string> values(schema.size());
  std::vector<CLI::Option*> options;
  for (size_t i = 0; i < schema.size(); ++i) {
    options.push_back(
        app.add_option(schema[i].flag, values[i], FlagHelp(schema[i]))->type_name("VALUE"));
    known.push_back(schema[i].flag);
  }
  line.reference.AddTo(app);
  for (std::string& name : ReferenceFlags::Names()) known.push_back(std::move(name));
  CLI::App* serve = app.add_subcommand("serve", "serve (what happens without a subcommand)");
  CLI::App* check =
      app.add_subcommand("check", "check configuration and model repository, and exit");
  serve->fallthrough();
  check->fallthrough();

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    line.text = app.help();
    return absl::OkStatus();
  } catch (const CLI::CallForVersion&) {
    line.text = absl::StrCat("dlo-serve ", BuildId(), "\n");
    return absl::OkStatus();
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(absl::StrCat(error.what(), "; see dlo-serve --help"));
  }
  for (const std::string& extra : app.remaining(/*recurse=*/true)) {
    const std::string flag = extra.substr(0, extra.find('='));
    const std::string nearest = absl::StartsWith(flag, "-") ? NearestName(flag, known) : "";
    return absl::InvalidArgumentError(
        absl::StrCat("unknown argument \"", extra.substr(0, 100), "\"",
                     nearest.empty() ? "; see dlo-serve --help"
                                     : absl::StrCat("; did you mean ", nearest, "?")));
  }
  line.check = check->parsed();
  line.print_config = print_config;
  if (config_option->count() > 0) line.config_file = config_file;
  for (size_t i = 0; i < schema.size(); ++i) {
    if (options[i]->count() > 0) line.flags[schema[i].flag] = values[i];
  }
  ASSIGN_OR_RETURN(ReferenceFlags::MappedFlags mapped, line.reference.Map(line.flags));
  line.flags.merge(mapped.values);
  line.flags_as_written = std::move(mapped.as_written);
  return absl::OkStatus();
}

}  // namespace

InstallLayout InstallLayout::OfThisProcess() {
  InstallLayout layout;
  std::error_code error;
  const std::filesystem::path executable = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) layout.executable_dir = executable.parent_path();
  layout.source_dir = DLO_SOURCE_DIR;
  return layout;
}

absl::StatusOr<std::filesystem::path> InstallLayout::DemoModel() const {
  std::vector<std::string> looked_at;
  const auto found = [&](const std::filesystem::path& folder) {
    looked_at.push_back(folder.string());
    std::error_code error;
    return std::filesystem::exists(folder / "model_index.json", error);
  };
  std::filesystem::path installed = (executable_dir / "../share/dlo/shapes").lexically_normal();
  if (found(installed)) return installed;
  if (!source_dir.empty() && found(source_dir / "assets/shapes"))
    return source_dir / "assets/shapes";
  return absl::NotFoundError(absl::StrCat("no model is configured and the demo model is not in ",
                                          absl::StrJoin(looked_at, " or "),
                                          "; set --model or model.path in a --config file"));
}

absl::StatusOr<ServeCommand> ParseServeCommand(
    int argc, const char* const* argv, const std::map<std::string, std::string>& environment,
    const InstallLayout& layout) {
  const absl::StatusOr<std::filesystem::path> demo = layout.DemoModel();
  // Without a demo model the default is one that is refused below, unless another model is
  // configured.
  constexpr char kNoModel[] = "(none)";
  const ConfigSchema schema =
      ServeSchema(demo.ok() ? demo->string() : kNoModel, DefaultDataDir(environment));
  CommandLine line;
  RETURN_IF_ERROR(ParseCommandLine(argc, argv, schema, &line));
  ServeCommand command;
  if (!line.text.empty()) {
    command.action = ServeCommand::Action::kPrint;
    command.text = line.text;
    return command;
  }

  ConfigSources sources;
  sources.environment = environment;
  sources.other_environment = {kConfigVariable};
  sources.flags = line.flags;
  sources.flags_as_written = line.flags_as_written;
  if (line.config_file) {
    sources.file = *line.config_file;
  } else if (const auto it = environment.find(kConfigVariable); it != environment.end()) {
    sources.file = it->second;
  }
  ASSIGN_OR_RETURN(const Config config, Config::Load(schema, sources));
  if (!demo.ok() && config.IsDefault("model.path")) return demo.status();
  const std::vector<std::string> problems = FindProblems(config);
  if (!problems.empty()) return absl::InvalidArgumentError(absl::StrJoin(problems, "\n"));

  command.config = ToServeConfig(config);
  command.config.notices = line.reference.Notices(config.String("offload.transfer") != "none");
  if (std::string why = UnusedStore(command.config); !why.empty()) {
    command.config.notices.push_back(std::move(why));
  }
  command.action = line.check ? ServeCommand::Action::kCheck : ServeCommand::Action::kServe;
  if (line.print_config) {
    command.action = ServeCommand::Action::kPrint;
    for (const std::string& notice : command.config.notices) {
      absl::StrAppend(&command.text, "# ", notice, "\n");
    }
    absl::StrAppend(&command.text, config.Dump());
  }
  return command;
}

absl::Status CheckServeConfig(const ServeConfig& config, std::ostream& out) {
  for (const std::string& notice : config.notices) out << "note: " << notice << "\n";
  if (config.remote.ranks > 0) RETURN_IF_ERROR(LoadLinkTls(config.remote.tls).status());
  out << "configuration: ok\n";
  ASSIGN_OR_RETURN(const std::filesystem::path root, ResolveModelPath(config.model.path));
  out << "model: " << root.string() << "\n";
  ASSIGN_OR_RETURN(const Topology topology, Topology::Create({.dp = config.parallel.dp}));
  std::optional<HostWeightSettings> streaming;
  if (topology.EffectiveTransfer(config.offload.transfer) == WeightTransfer::kRankLocal) {
    streaming = {.mmap = config.host_weights.checkpoint_mmap};
  }
  if (streaming && config.host_weights.mode != hwr::Mode::kDisabled) {
    ASSIGN_OR_RETURN(const StoreUse use, CheckStore(config, root, out));
    streaming->canonical = use == StoreUse::kPublishes;
    if (use == StoreUse::kRestores) streaming.reset();
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> lines,
                   CheckModelFiles(root, config.model.dtype, streaming, config.model.quantization));
  for (const std::string& line : lines) out << line << "\n";
  return absl::OkStatus();
}

}  // namespace dlo
