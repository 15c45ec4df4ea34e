#include "weights/weights_tool.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/json.h"
#include "base/quantization.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "loader/hwr/store.h"
#include "loader/model_path.h"
#include "models/host_weight_identity.h"
#include "nlohmann/json.hpp"
#include "proto/build_id.h"

namespace dlo {
namespace {

constexpr size_t kPrefixMin = 8;

struct Options {
  std::string root;
  std::string model;
  std::string dtype = "bfloat16";
  std::string quantization = "none";
  hwr::StorePolicy policy;
  absl::Duration wait = absl::Seconds(600);
  int threads = 0;
  bool pin = false;
  bool json = false;
  std::vector<std::string> keys;
  std::optional<int64_t> fit_bytes;
  bool quarantine = false;
  absl::Duration older_than = absl::ZeroDuration();
};

absl::Status Annotate(const absl::Status& status, const std::string& what) {
  return absl::Status(status.code(), absl::StrCat(what, ": ", status.message()));
}

absl::StatusOr<std::unique_ptr<hwr::Store>> OpenStore(const Options& options, bool read_only) {
  hwr::Store::OpenResult opened = hwr::Store::Open({
      .root = options.root,
      .policy = options.policy,
      .read_only = read_only,
      .wait = options.wait,
  });
  if (const auto* failure = std::get_if<hwr::Failure>(&opened)) return failure->ToStatus();
  return std::get<std::unique_ptr<hwr::Store>>(std::move(opened));
}

// Opens a store that is there: to change it, not to make it.
absl::StatusOr<std::unique_ptr<hwr::Store>> OpenExisting(const Options& options) {
  RETURN_IF_ERROR(OpenStore(options, /*read_only=*/true).status());
  return OpenStore(options, /*read_only=*/false);
}

// The key that `text` is, or is the beginning of.
absl::StatusOr<std::string> FindKey(const hwr::StoreInventory& inventory, const std::string& text) {
  if (hwr::IsDigest(text)) return text;
  std::vector<std::string> found;
  for (const hwr::StoreEntry& entry : inventory.entries) {
    const bool artifact = hwr::IsDigest(entry.name);
    if (artifact && text.size() >= kPrefixMin && absl::StartsWith(entry.key, text)) {
      found.push_back(entry.key);
    }
  }
  if (found.size() == 1) return found[0];
  return absl::NotFoundError(absl::StrCat(JsonExcerpt(text),
                                          found.empty()
                                              ? " is no artifact of this store (a key, or at least "
                                              : " is the beginning of several keys (of at least ",
                                          kPrefixMin, " digits of one)"));
}

std::string RateText(int64_t bytes, absl::Duration time) {
  const double seconds = absl::ToDoubleSeconds(time);
  return absl::StrFormat("%.1f MB in %.2f s, %.2f GB/s", static_cast<double>(bytes) / 1e6, seconds,
                         seconds > 0 ? static_cast<double>(bytes) / 1e9 / seconds : 0.0);
}

absl::Status Prewarm(const Options& options, std::ostream& out) {
  ASSIGN_OR_RETURN(const std::filesystem::path model, ResolveModelPath(options.model));
  ASSIGN_OR_RETURN(const std::unique_ptr<hwr::Store> store, OpenStore(options, false));
  ASSIGN_OR_RETURN(const OnlineQuantization quantization,
                   ParseOnlineQuantization(options.quantization));
  std::error_code ignored;
  const absl::Time start = absl::Now();
  const hwr::DigestCache cache = store->digests(start + options.wait);
  ASSIGN_OR_RETURN(
      const HostWeightArtifact artifact,
      DescribeHostWeights(model,
                          {.dtype = options.dtype == "float32" ? DType::kF32 : DType::kBF16,
                           .quantization = quantization,
                           // A folder of that name would have been taken before the hub's cache.
                           .from_hub = !absl::StartsWith(options.model, "~") &&
                                       !std::filesystem::exists(options.model, ignored),
                           .cache = &cache,
                           .threads = options.threads}));
  out << "key: " << artifact.identity.key << "\n"
      << "sources: " << artifact.sources.num_files() << " files, "
      << RateText(artifact.sources.bytes_hashed(), absl::Now() - start) << " hashed\n";
  CheckpointProducer producer(artifact, options.threads);
  const hwr::PublicationRecord record =
      store->Publish(artifact.identity, artifact.layout, producer,
                     {.deadline = absl::Now() + options.wait, .threads = options.threads});
  using Outcome = hwr::PublicationOutcome;
  if (record.outcome != Outcome::kPublished && record.outcome != Outcome::kAlreadyPresent &&
      record.outcome != Outcome::kJoined) {
    return record.failure.ToStatus();
  }
  out << "artifact: " << std::string(hwr::PublicationOutcomeName(record.outcome));
  if (record.outcome == Outcome::kPublished) {
    out << ", " << RateText(record.bytes, record.time - record.waited);
    if (record.evicted > 0) out << ", " << record.evicted << " others evicted";
  }
  out << "\n";
  if (options.pin) {
    RETURN_IF_ERROR(store->Pin(artifact.identity.key));
    out << "pinned\n";
  }
  return absl::OkStatus();
}

nlohmann::json EntryJson(const hwr::StoreEntry& entry) {
  const nlohmann::json identity = entry.identity.empty()
                                      ? nlohmann::json()
                                      : nlohmann::json::parse(entry.identity, nullptr, false);
  return {{"name", entry.name},
          {"key", entry.key},
          {"state", std::string(hwr::EntryStateName(entry.state))},
          {"bytes", entry.bytes},
          {"last_lease", absl::FormatTime(entry.last_lease, absl::UTCTimeZone())},
          {"pinned", entry.pinned},
          {"leased", entry.leased},
          {"identity", identity},
          {"problem", entry.problem}};
}

absl::Status List(const Options& options, std::ostream& out) {
  ASSIGN_OR_RETURN(const std::unique_ptr<hwr::Store> store, OpenStore(options, true));
  ASSIGN_OR_RETURN(const hwr::StoreInventory inventory, store->Inventory());
  if (options.json) {
    nlohmann::json entries = nlohmann::json::array();
    for (const hwr::StoreEntry& entry : inventory.entries) entries.push_back(EntryJson(entry));
    out << nlohmann::json{{"root", store->root().native()},
                          {"domain", inventory.domain_id},
                          {"filesystem", inventory.filesystem},
                          {"max_store_bytes", inventory.policy.max_store_bytes},
                          {"max_artifact_bytes", inventory.policy.max_artifact_bytes},
                          {"min_free_bytes", inventory.policy.min_free_bytes},
                          {"bytes", inventory.bytes},
                          {"free_bytes", inventory.free_bytes},
                          {"entries", std::move(entries)}}
               .dump(2, ' ', false, nlohmann::json::error_handler_t::replace)
        << "\n";
    return absl::OkStatus();
  }
  const auto limit = [](int64_t bytes) {
    return bytes > 0 ? FormatBytes(bytes) : std::string("none");
  };
  out << absl::StrFormat("%s: %s, %.1f MB stored, limit %s\n", store->root().native(),
                         inventory.filesystem, static_cast<double>(inventory.bytes) / 1e6,
                         limit(inventory.policy.max_store_bytes));
  for (const hwr::StoreEntry& entry : inventory.entries) {
    std::string what;
    if (!entry.identity.empty()) {
      const nlohmann::json identity = nlohmann::json::parse(entry.identity);
      what = absl::StrCat(identity["model"]["family"].get<std::string>(), " ",
                          identity["representation"]["dtype"].get<std::string>());
      const std::string quantization =
          identity["representation"]["quantization"].get<std::string>();
      if (quantization != "none") absl::StrAppend(&what, " ", quantization);
    }
    out << absl::StrFormat(
        "%s  %-11s %9.1f MB  %s%s%s  %s\n", entry.key.substr(0, 16),
        std::string(hwr::EntryStateName(entry.state)), static_cast<double>(entry.bytes) / 1e6,
        absl::FormatTime("%Y-%m-%d %H:%M:%S", entry.last_lease, absl::LocalTimeZone()),
        entry.pinned ? "  pinned" : "", entry.leased ? "  leased" : "",
        entry.problem.empty() ? what : entry.problem);
  }
  return absl::OkStatus();
}

absl::Status Verify(const Options& options, std::ostream& out) {
  ASSIGN_OR_RETURN(const std::unique_ptr<hwr::Store> store, OpenExisting(options));
  ASSIGN_OR_RETURN(const hwr::StoreInventory inventory, store->Inventory());
  std::vector<std::string> keys;
  for (const std::string& text : options.keys) {
    ASSIGN_OR_RETURN(std::string key, FindKey(inventory, text));
    keys.push_back(std::move(key));
  }
  if (options.keys.empty()) {
    for (const hwr::StoreEntry& entry : inventory.entries) {
      if (hwr::IsDigest(entry.name)) keys.push_back(entry.key);
    }
  }
  absl::Status status;
  for (const std::string& key : keys) {
    const absl::Time start = absl::Now();
    const hwr::LookupResult found =
        store->Verify(key, {.deadline = start + options.wait, .threads = options.threads});
    if (found.lease) {
      out << key << ": as it was published, " << RateText(found.lease->bytes(), absl::Now() - start)
          << "\n";
    } else {
      out << key << ": " << found.failure.Text() << "\n";
      status.Update(Annotate(found.failure.ToStatus(), key));
    }
  }
  return status;
}

absl::Status Evict(const Options& options, std::ostream& out) {
  ASSIGN_OR_RETURN(const std::unique_ptr<hwr::Store> store, OpenExisting(options));
  ASSIGN_OR_RETURN(const hwr::StoreInventory inventory, store->Inventory());
  const absl::Time deadline = absl::Now() + options.wait;
  for (const std::string& text : options.keys) {
    ASSIGN_OR_RETURN(const std::string key, FindKey(inventory, text));
    RETURN_IF_ERROR(store->Evict(key, deadline));
    out << key << ": evicted\n";
  }
  if (options.quarantine) {
    ASSIGN_OR_RETURN(const int cleared, store->ClearQuarantine(options.older_than, deadline));
    out << cleared << " removed from quarantine\n";
  }
  if (options.fit_bytes) {
    ASSIGN_OR_RETURN(const int evicted, store->EvictToFit(*options.fit_bytes, deadline));
    out << evicted << " evicted; " << FormatBytes(*options.fit_bytes) << " fit\n";
  }
  return absl::OkStatus();
}

absl::Status Pin(const Options& options, bool pinned, std::ostream& out) {
  ASSIGN_OR_RETURN(const std::unique_ptr<hwr::Store> store, OpenExisting(options));
  ASSIGN_OR_RETURN(const hwr::StoreInventory inventory, store->Inventory());
  for (const std::string& text : options.keys) {
    ASSIGN_OR_RETURN(const std::string key, FindKey(inventory, text));
    RETURN_IF_ERROR(pinned ? store->Pin(key) : store->Unpin(key));
    out << key << (pinned ? ": pinned\n" : ": not pinned any more\n");
  }
  return absl::OkStatus();
}

void AddSize(CLI::App* command, const char* flag, const char* what,
             std::function<void(int64_t)> set) {
  command->add_option_function<std::string>(
      flag,
      [flag, set = std::move(set)](const std::string& text) {
        const absl::StatusOr<int64_t> bytes = ParseBytes(text);
        if (!bytes.ok()) throw CLI::ValidationError(flag, std::string(bytes.status().message()));
        set(*bytes);
      },
      what);
}

void AddDuration(CLI::App* command, const char* flag, const char* what, absl::Duration* out) {
  command->add_option_function<std::string>(
      flag,
      [flag, out](const std::string& text) {
        const absl::StatusOr<absl::Duration> duration = ParseDuration(text);
        if (!duration.ok()) {
          throw CLI::ValidationError(flag, std::string(duration.status().message()));
        }
        *out = *duration;
      },
      what);
}

CLI::App* AddCommand(CLI::App* app, const char* name, const char* what, Options* options) {
  CLI::App* const command = app->add_subcommand(name, what);
  command->add_option("--root", options->root, "The store: host_weights.root of dlo-serve")
      ->required();
  AddDuration(command, "--wait", "For locks that other processes hold (600s)", &options->wait);
  return command;
}

}  // namespace

int RunWeightsTool(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  Options options;
  CLI::App app("Looks after stores of host weights", "dlo-weights");
  app.set_version_flag("--version", "dlo-weights " + std::string(BuildId()));
  app.require_subcommand(1);

  CLI::App* const prewarm =
      AddCommand(&app, "prewarm", "Builds the artifact of a model, as a worker would", &options);
  prewarm->add_option("--model", options.model, "A folder or a Hugging Face id")->required();
  prewarm->add_option("--dtype", options.dtype, "bfloat16 or float32: the one to serve with")
      ->check(CLI::IsMember({"bfloat16", "float32"}))
      ->capture_default_str();
  prewarm->add_option("--quantization", options.quantization, "none or fp8: the same")
      ->check(CLI::IsMember({"none", "fp8"}))
      ->capture_default_str();
  prewarm->add_option("--threads", options.threads, "0: as many as there are cores")
      ->check(CLI::Range(0, 1024));
  prewarm->add_flag("--pin", options.pin, "Never evict it");
  const auto limit = [&](int64_t hwr::StorePolicy::* field) {
    return [&options, field](int64_t bytes) { options.policy.*field = bytes; };
  };
  AddSize(prewarm, "--max-store-bytes",
          "Limit of a new store; of one that is there, its own; 0: any",
          limit(&hwr::StorePolicy::max_store_bytes));
  AddSize(prewarm, "--max-artifact-bytes", "The same of one artifact",
          limit(&hwr::StorePolicy::max_artifact_bytes));
  AddSize(prewarm, "--min-free-bytes", "What must stay free of the filesystem",
          limit(&hwr::StorePolicy::min_free_bytes));

  CLI::App* const list = AddCommand(&app, "list", "What a store holds", &options);
  list->add_flag("--json", options.json, "All of it, as JSON");

  CLI::App* const verify =
      AddCommand(&app, "verify", "Checks every byte; what is corrupt goes to quarantine", &options);
  verify->add_option("keys", options.keys, "Keys, or their first digits; none: all");
  verify->add_option("--threads", options.threads, "0: as many as there are cores")
      ->check(CLI::Range(0, 1024));

  CLI::App* const evict = AddCommand(&app, "evict", "Removes artifacts", &options);
  evict->add_option("keys", options.keys, "Keys, or their first digits");
  AddSize(evict, "--fit", "Removes the least recently leased until so many bytes fit",
          [&](int64_t bytes) { options.fit_bytes = bytes; });
  evict->add_flag("--quarantine", options.quarantine, "Empties the quarantine");
  AddDuration(evict, "--older-than", "Of the quarantine, only what is there for longer",
              &options.older_than);

  CLI::App* const pin = AddCommand(&app, "pin", "Never evicts an artifact", &options);
  CLI::App* const unpin = AddCommand(&app, "unpin", "Lets it be evicted again", &options);
  for (CLI::App* const command : {pin, unpin}) {
    command->add_option("keys", options.keys, "Keys, or their first digits")->required();
  }

  try {
    app.parse(argc, argv);
    if (evict->parsed() && options.keys.empty() && !options.fit_bytes && !options.quarantine) {
      throw CLI::ValidationError("evict", "needs keys, --fit or --quarantine");
    }
  } catch (const CLI::ParseError& error) {
    return app.exit(error, out, err) == 0 ? 0 : 2;
  }

  absl::Status status;
  if (prewarm->parsed()) status = Prewarm(options, out);
  if (list->parsed()) status = List(options, out);
  if (verify->parsed()) status = Verify(options, out);
  if (evict->parsed()) status = Evict(options, out);
  if (pin->parsed()) status = Pin(options, true, out);
  if (unpin->parsed()) status = Pin(options, false, out);
  if (status.ok()) return 0;
  err << "dlo-weights: " << std::string(status.message()) << "\n";
  return 1;
}

}  // namespace dlo
