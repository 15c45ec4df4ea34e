// A model's load as the Host Weight Runtime's transaction: from the store's artifact if there is
// one that fits, else from the checkpoint.
//
//   class WanBuilder : public ModelBuilder { ... };
//   WanBuilder builder(options);
//   RETURN_IF_ERROR(BuildModel(options, builder, &report));
//   return builder.Finish();
//
// Decides nothing about the device: where the host's bytes come from, what is tried next, and who
// owns the lease meanwhile (loader/hwr/startup.h). Torch-free. Belongs to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/dtype.h"
#include "base/quantization.h"
#include "loader/hwr/layout.h"
#include "loader/hwr/lease.h"
#include "loader/hwr/outcome.h"
#include "loader/hwr/store.h"

namespace dlo {

// The store of host weights in their final layout.
struct HostWeightStoreOptions {
  hwr::Mode mode = hwr::Mode::kDisabled;
  std::filesystem::path root;
  hwr::Validation validation = hwr::Validation::kMetadata;
  // 0: the one that the store has.
  int64_t max_store_bytes = 0;
  int64_t min_free_bytes = 0;
  absl::Duration wait = absl::Seconds(600);  // for locks of others
  // The model was named by a hub id, not by a folder.
  bool from_hub = false;
};

// Where a component's weights are on the host.
struct HostBacking {
  std::string component;
  std::string backing;  // "artifact", "checkpoint" (its blocks), "memory", "device"
  std::string
      reason;  // why not in the checkpoint's pages: a PlanRefusalName; empty: none is needed
  std::string message;  // the same for people
};

// How a load went.
struct StartupReport {
  hwr::StartupRecord record;
  std::vector<HostBacking> components;
  absl::Duration time;
};

// What a store is opened with, by a start and by whoever looks at what a start would find.
hwr::StoreOptions StoreOptionsOf(const HostWeightStoreOptions& options, bool read_only = false);

// What a family does for its part. A model is built by Restore or Load, then Enable; Discard undoes
// all of it. Errors are those of loading.
class ModelBuilder {
 public:
  virtual ~ModelBuilder() = default;

  // Binds every component to the artifact's bytes; reads no weights.
  virtual absl::Status Restore(const hwr::Lease& lease) = 0;
  // Reads from the checkpoint. With `may_map` blocks may stay in its pages; without it all weights
  // are in private memory.
  virtual absl::Status Load(bool may_map) = 0;
  // Makes the model ready for requests. After Restore `lease`, by which the bytes are mapped, is
  // the builder's, to be let go last of all.
  virtual absl::Status Enable(std::shared_ptr<const hwr::Lease> lease) = 0;
  virtual void Discard() = 0;

  // Of the host's copy, as Restore wants it; known from the start.
  virtual hwr::ArtifactLayout layout() const = 0;
  // INVALID_ARGUMENT for what is not in the layout, and a `to` of another size than the part's.
  virtual absl::Status CopyPart(const std::string& component, int part,
                                absl::Span<std::byte> to) = 0;
  // Where the part's bytes lie; null: not in one run.
  virtual const std::byte* part_data(const std::string& component, int part) = 0;

  // Of what Load and Enable did.
  virtual int64_t read_bytes() const = 0;
  virtual int64_t mapped_bytes() const = 0;
  virtual int64_t pinned_bytes() const = 0;
  virtual std::vector<HostBacking> backings() const = 0;
};

struct ModelStartupOptions {
  std::filesystem::path root;  // of the repository
  DType dtype = DType::kBF16;
  OnlineQuantization quantization = OnlineQuantization::kNone;
  HostWeightStoreOptions store;
  // Why the model needs no store: its blocks stay on the device, or ranks hold shards of them.
  // Empty: it may use one.
  std::string direct;
  int threads = 0;
  // Told the name of each state that is entered ("RESTORE_PLANNED"), before anything is done in it;
  // for tests.
  std::function<void(absl::string_view state)> on_state;
};

// OK: the builder has a model that is ready. The report is filled in whatever happens.
absl::Status BuildModel(const ModelStartupOptions& options, ModelBuilder& builder,
                        StartupReport* report);

}  // namespace dlo
