#include "models/wan/wan_pipeline.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/cgroup_memory.h"
#include "base/status_macros.h"
#include "loader/checkpoint.h"
#include "loader/host_table.h"
#include "loader/host_weight_plan.h"
#include "loader/hwr/lease.h"
#include "models/component_weights.h"
#include "models/cpu_allocator.h"
#include "models/host_weight_identity.h"
#include "models/model_card.h"
#include "models/schedulers/flow_solver.h"
#include "models/text/prompt_clean.h"
#include "models/text/t5_tokenizer.h"
#include "models/umt5/umt5.h"
#include "models/umt5/umt5_specs.h"
#include "models/wan/transformer.h"
#include "models/wan/vae.h"
#include "models/wan/wan_card.h"
#include "models/wan/wan_offload_plan.h"
#include "models/wan/wan_plan.h"
#include "models/wan/wan_weight_needs.h"
#include "offload/timeline.h"
#include "runtime/device.h"

namespace dlo {
namespace {

// Text rows the transformer sees for every prompt; what a prompt does not fill is zeros.
constexpr int kTextRows = 512;

// Of a timeline: the newest. With at most 4 events of 120 bytes each, and 1000 steps, it stays
// below 3 MiB.
constexpr int64_t kTimelineVisits = 6000;

absl::Status Cancelled() { return absl::CancelledError("the request was cancelled"); }

// Runs f, which may throw what libtorch throws, and makes a Status of it.
template <typename F>
auto CatchTorch(F f) -> decltype(f()) {
  try {
    return f();
  } catch (const c10::OutOfMemoryError& e) {
    return absl::ResourceExhaustedError(e.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("the process is out of memory");
  } catch (const c10::Error& e) {
    const std::string what = e.what_without_backtrace();
    // The CPU allocator has no exception of its own.
    if (what.find("not enough memory") != std::string::npos) {
      return absl::ResourceExhaustedError(what);
    }
    return absl::InternalError(what);
  } catch (const std::exception& e) {
    return absl::InternalError(e.what());
  }
}

// Notes when the stages and steps of a request begin and end, and passes on what it hears.
class TimelineObserver : public GenerationObserver {
 public:
  // `timeline` null: only passes on. Its times count from `zero`.
  TimelineObserver(GenerationObserver& observer, Timeline* timeline, absl::Time zero)
      : observer_(observer), timeline_(timeline), zero_(zero) {}

  void OnStage(Stage stage) override {
    if (timeline_ != nullptr) {
      constexpr const char* kNames[] = {"text", "denoise", "decode"};
      const absl::Duration now = Now();
      if (!timeline_->stages.empty()) timeline_->stages.back().end = now;
      timeline_->stages.push_back({kNames[static_cast<int>(stage)], now, now});
      step_begin_ = now;
    }
    observer_.OnStage(stage);
  }
  void OnStep(int step, int num_steps) override {
    if (timeline_ != nullptr) {
      const absl::Duration now = Now();
      timeline_->steps.push_back({absl::StrCat("step ", step), step_begin_, now});
      step_begin_ = now;
    }
    observer_.OnStep(step, num_steps);
  }
  absl::Status OnFrames(const FrameSpan& frames) override { return observer_.OnFrames(frames); }
  bool cancelled() const override { return observer_.cancelled(); }

  // The last stage has ended.
  void Close() {
    if (timeline_ != nullptr) timeline_->stages.back().end = Now();
  }

 private:
  absl::Duration Now() const { return absl::Now() - zero_; }

  GenerationObserver& observer_;
  Timeline* const timeline_;
  const absl::Time zero_;
  absl::Duration step_begin_;
};

absl::Status Annotate(const absl::Status& status, absl::string_view component) {
  return status.ok() ? status
                     : absl::Status(status.code(), absl::StrCat(component, ": ", status.message()));
}

// A component's weight files and what they must give.
struct Source {
  ComponentNeeds needs;
  std::shared_ptr<const Checkpoint> checkpoint;
};

absl::StatusOr<std::vector<Source>> OpenSources(const std::filesystem::path& root,
                                                const WanConfig& config, DType dtype,
                                                OnlineQuantization quantization) {
  std::vector<Source> sources;
  std::vector<ComponentNeeds> all = WanWeightNeeds(config, dtype, quantization);
  for (ComponentNeeds& needs : all) {
    absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(root / needs.folder);
    if (!checkpoint.ok()) return Annotate(checkpoint.status(), needs.name);
    LoadOptions whole;
    whole.ignore_unexpected = needs.ignore_unexpected;
    absl::Status status = CheckTensors(*checkpoint, needs.specs, whole);
    if (!status.ok()) return Annotate(status, needs.name);
    sources.push_back(
        {std::move(needs), std::make_shared<const Checkpoint>(*std::move(checkpoint))});
  }
  return sources;
}

absl::StatusOr<ComponentWeights> LoadComponent(const OffloadComponent& component,
                                               const Source& source, Device& device, int threads,
                                               const WeightPlacement& placement,
                                               const ComponentPlan* plan,
                                               std::atomic<int64_t>* read_bytes) {
  // OpenSources has seen to it that nothing is left over.
  const LoadOptions options = {.partial = true, .threads = threads, .read_bytes = read_bytes};
  absl::StatusOr<ComponentWeights> weights =
      plan != nullptr && plan->mapped()
          ? ComponentWeights::LoadMapped(source.checkpoint, component.specs, device, options,
                                         placement, *plan)
          : ComponentWeights::Load(*source.checkpoint, component.specs, device, options, placement);
  if (!weights.ok()) return Annotate(weights.status(), component.name);
  return weights;
}

}  // namespace

WanPipeline::WanPipeline(WanComponents components) : c_(std::move(components)) {}

// An abandoned plan may still be fetching from the components' host memory.
WanPipeline::~WanPipeline() { c_.streamer.reset(); }

absl::StatusOr<GenerationStats> WanPipeline::Generate(const VideoRequest& request,
                                                      GenerationObserver& observer) {
  return CatchTorch([&]() -> absl::StatusOr<GenerationStats> {
    const c10::InferenceMode inference;
    return Run(request, observer);
  });
}

absl::Status WanPipeline::Walk(const VideoSettings& settings) {
  if (c_.weight_group == nullptr) return absl::OkStatus();
  ASSIGN_OR_RETURN(VisitPlan plan, WanVisitPlan(c_.config, settings));
  RETURN_IF_ERROR(c_.streamer->Start(std::move(plan)));
  return FinishWalk();
}

absl::Status WanPipeline::FinishWalk() {
  if (c_.weight_group == nullptr) return absl::OkStatus();
  RETURN_IF_ERROR(c_.streamer->Finish());
  return c_.streamer->Stop();
}

absl::Status WanPipeline::health() const {
  return c_.weight_group == nullptr ? absl::OkStatus() : c_.weight_group->status();
}

DeviceMemory WanPipeline::UsedMemory() const {
  DeviceMemory memory = c_.device->memory();
  if (c_.device->kind() == DeviceKind::kCpu) {
    // Buffers do not change during a stage, so the peaks add up.
    const DeviceMemory tensors = CpuTensorMemory();
    memory.used_bytes += tensors.used_bytes;
    memory.peak_bytes += tensors.peak_bytes;
  }
  return memory;
}

int64_t WanPipeline::TakeDevicePeak() {
  const int64_t peak = UsedMemory().peak_bytes;
  stages_peak_ = std::max<int64_t>(stages_peak_, peak);
  c_.device->ResetPeak();
  ResetCpuTensorPeak();
  return peak;
}

PipelineMemory WanPipeline::memory() const {
  const int64_t at_rest = tensors_at_rest_;
  const DeviceMemory memory = UsedMemory();
  const int64_t tensors = memory.used_bytes - memory.buffer_bytes;
  return {.used_bytes = memory.used_bytes,
          .peak_bytes = std::max<int64_t>(stages_peak_, memory.peak_bytes),
          .weights_bytes = memory.buffer_bytes + (at_rest < 0 ? tensors : at_rest),
          .pinned_bytes = memory.host_bytes};
}

absl::StatusOr<GenerationStats> WanPipeline::Run(const VideoRequest& request,
                                                 GenerationObserver& request_observer) {
  GenerationStats stats;
  visits_.reset();
  // In a group nothing may fail before the plan has begun: FinishWalk could not walk it.
  try {
    if (request.trace && c_.streamer != nullptr) visits_.emplace(kTimelineVisits);
  } catch (const std::bad_alloc&) {
    // Then the timeline has no visits.
  }
  TakeDevicePeak();
  stages_peak_ = 0;
  const DeviceMemory before = UsedMemory();
  tensors_at_rest_ = before.used_bytes - before.buffer_bytes;
  const absl::Cleanup at_rest = [this] { tensors_at_rest_ = -1; };
  // In a group the slots are needed for the rest of the plan, whatever becomes of the request.
  absl::Cleanup give_back = [this] {
    if (c_.streamer != nullptr && c_.weight_group == nullptr) c_.streamer->Stop().IgnoreError();
  };
  if (c_.streamer != nullptr) {
    ASSIGN_OR_RETURN(VisitPlan plan, WanVisitPlan(c_.config, request.settings, c_.resident_blocks));
    RETURN_IF_ERROR(c_.streamer->Start(std::move(plan), visits_ ? &*visits_ : nullptr));
  }
  const absl::Time start = c_.streamer != nullptr ? c_.streamer->start_time() : absl::Now();
  Timeline timeline{.rank = c_.rank};
  TimelineObserver observer(request_observer, request.trace ? &timeline : nullptr, start);

  observer.OnStage(Stage::kEncodingText);
  ASSIGN_OR_RETURN(const std::vector<TextEmbedding> texts, EncodePrompts(request, observer));
  const absl::Time text_end = absl::Now();
  stats.text = text_end - start;
  stats.device_bytes_peak_text = TakeDevicePeak();

  observer.OnStage(Stage::kDenoising);
  ASSIGN_OR_RETURN(const at::Tensor latents, Denoise(request.settings, texts, observer));
  if (c_.streamer != nullptr) {
    RETURN_IF_ERROR(c_.streamer->Stop());
    TellStreaming(&stats);
  }
  const absl::Time denoise_end = absl::Now();
  stats.denoise = denoise_end - text_end;
  stats.device_bytes_peak_denoise = TakeDevicePeak();

  observer.OnStage(Stage::kDecoding);
  RETURN_IF_ERROR(Decode(latents, observer));
  stats.decode = absl::Now() - denoise_end;
  stats.device_bytes_peak_decode = TakeDevicePeak();
  observer.Close();
  if (request.trace) {
    if (c_.streamer != nullptr) {
      timeline.visits = &*visits_;
      timeline.fill_kind = c_.streamer->fill_kind();
      timeline.deliver_kind = c_.streamer->deliver_kind();
      timeline.ring_names = {"text_encoder", "transformer", "transformer_2"};
    }
    stats.timeline = TimelineJson(timeline);
  }
  return stats;
}

absl::StatusOr<std::vector<TextEmbedding>> WanPipeline::EncodePrompts(
    const VideoRequest& request, GenerationObserver& observer) {
  RETURN_IF_ERROR(c_.text_encoder.weights().BringIn());
  absl::Cleanup put_out = [this] { c_.text_encoder.weights().PutOut(); };
  const auto encode = [this](const std::string& prompt) {
    return EncodeText(c_.tokenizer->Encode(CleanPrompt(prompt), kTextRows), kTextRows);
  };
  std::vector<TextEmbedding> texts;
  ASSIGN_OR_RETURN(TextEmbedding positive, encode(request.prompt));
  texts.push_back(std::move(positive));
  if (request.settings.guidance_scale > 1) {
    if (observer.cancelled()) return Cancelled();
    ASSIGN_OR_RETURN(TextEmbedding negative, encode(request.negative_prompt));
    texts.push_back(std::move(negative));
  }
  return texts;
}

void WanPipeline::TellStreaming(GenerationStats* stats) {
  const StreamerStats text = c_.streamer->stats(kWanTextRing);
  StreamerStats denoise;
  for (size_t i = 0; i < c_.experts.size(); ++i) {
    denoise += c_.streamer->stats(kWanTransformerRing + static_cast<int>(i));
  }
  stats->bus_bytes = text.bus_bytes + denoise.bus_bytes;
  for (const auto& [stage, streamed] :
       {std::pair(Stage::kEncodingText, text), std::pair(Stage::kDenoising, denoise)}) {
    if (streamed.visits > 0) stats->streaming.push_back({stage, streamed});
  }
}

absl::StatusOr<TextEmbedding> WanPipeline::EncodeText(const std::vector<int64_t>& ids,
                                                      int64_t text_rows) {
  ASSIGN_OR_RETURN(at::Tensor rows, c_.text_encoder.Encode(ids));
  return TextEmbedding{std::move(rows), text_rows - static_cast<int64_t>(ids.size())};
}

at::Tensor WanPipeline::InitialLatents(const VideoSettings& settings) const {
  const WanVaeConfig& vae = c_.config.vae;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(settings.seed);
  return at::randn({1, c_.config.transformer.in_channels,
                    (settings.num_frames - 1) / vae.scale_factor_temporal + 1,
                    settings.height / vae.scale_factor_spatial,
                    settings.width / vae.scale_factor_spatial},
                   generator, at::TensorOptions().dtype(at::kFloat))
      .to(TorchDevice(*c_.device));
}

absl::StatusOr<at::Tensor> WanPipeline::Denoise(const VideoSettings& settings,
                                                const std::vector<TextEmbedding>& texts,
                                                GenerationObserver& observer) {
  ASSIGN_OR_RETURN(const FlowSchedulerConfig scheduler,
                   ResolveScheduler(c_.config.scheduler, settings));
  const auto solver = MakeFlowSolver(scheduler, settings.num_inference_steps);
  at::Tensor latents = InitialLatents(settings);

  std::optional<WanContext> context;  // of the expert that runs
  size_t running = 0;
  absl::Cleanup put_out = [&] { c_.experts[running].weights().PutOut(); };
  for (int step = 0; step < settings.num_inference_steps; ++step) {
    if (observer.cancelled()) return Cancelled();
    const float timestep = solver->schedule().timesteps[step];
    const size_t expert = WanExpertAt(c_.config, timestep);
    if (!context || expert != running) {
      context.reset();
      c_.experts[running].weights().PutOut();
      running = expert;
      RETURN_IF_ERROR(c_.experts[running].weights().BringIn());
      context =
          c_.experts[expert].Prepare({latents.size(2), latents.size(3), latents.size(4)}, texts);
    }
    // TI2V tells every token its own timestep; for text to video they are all equal, which is one
    // timestep.
    ASSIGN_OR_RETURN(
        at::Tensor velocity,
        c_.experts[expert].Forward(latents, at::full({1}, timestep, at::kFloat), *context));
    if (texts.size() > 1) {
      const at::Tensor positive = velocity.narrow(0, 0, 1), negative = velocity.narrow(0, 1, 1);
      const double scale = expert == 0
                               ? settings.guidance_scale
                               : settings.guidance_scale_2.value_or(settings.guidance_scale);
      velocity = negative + (positive - negative) * scale;
    }
    latents = solver->Step(velocity, latents);
    observer.OnStep(step + 1, settings.num_inference_steps);
  }
  return latents;
}

absl::Status WanPipeline::Decode(const at::Tensor& latents, GenerationObserver& observer) {
  std::optional<WanVae> staged;
  if (!c_.vae) {
    RETURN_IF_ERROR(c_.vae_weights->BringIn());
    // It keeps a layout of its own.
    absl::Cleanup put_out = [this] { c_.vae_weights->PutOut(); };
    staged.emplace(c_.config.vae,
                   [this](const std::string& name) { return c_.vae_weights->tensor(name); });
  }
  const WanVae& vae = c_.vae ? *c_.vae : *staged;
  absl::Status status;
  const auto hand_out = [&](const at::Tensor& frames) {
    const at::Tensor host = frames.cpu().contiguous();
    status =
        observer.OnFrames({.rgb = {host.const_data_ptr<float>(), static_cast<size_t>(host.numel())},
                           .num_frames = static_cast<int>(host.size(0)),
                           .height = static_cast<int>(host.size(1)),
                           .width = static_cast<int>(host.size(2))});
    return status.ok();
  };
  const bool whole = vae.Decode(DenormaliseLatents(c_.config.vae, latents.to(at::kFloat)), hand_out,
                                [&] { return observer.cancelled(); });
  RETURN_IF_ERROR(status);
  return whole ? absl::OkStatus() : Cancelled();
}

namespace {

// This process' machine, as its kernel names it until it is started again.
std::string HostName() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

// Against the configured limit or the cgroup's, whichever is lower.
absl::Status CheckHostMemory(const PipelineOptions& options, int64_t need_bytes) {
  HostMemoryNeed need = {.need_bytes = need_bytes,
                         .limit_bytes = options.host_memory_limit_bytes,
                         .limit_name = "offload.host_memory_limit",
                         .host = HostName()};
  const double cgroup_bytes = ReadCgroupMemory().limit_bytes;  // NaN or infinity: none
  if (cgroup_bytes < (need.limit_bytes > 0 ? static_cast<double>(need.limit_bytes) : 1e18)) {
    need.limit_bytes = static_cast<int64_t>(cgroup_bytes);
    need.limit_name = "the memory limit of this cgroup";
  }
  return options.weight_group != nullptr ? AgreeOnHostMemory(*options.weight_group, need)
                                         : dlo::CheckHostMemory(need, options.processes_on_host);
}

// Where the host's copies of streamed blocks come from; each component's answer is logged. Empty
// unless blocks are streamed whole.
absl::StatusOr<HostWeightPlan> PlanSources(const PipelineOptions& options,
                                           const std::vector<Source>& sources, bool may_map) {
  if (options.stream_slots == 0 || options.weight_group != nullptr) return HostWeightPlan();
  const HostWeightSettings settings = {.mmap = options.checkpoint_mmap, .canonical = !may_map};
  std::vector<ComponentNeeds> needs;
  std::vector<WeightSource> described;
  for (const Source& source : sources) {
    needs.push_back(source.needs);
    described.push_back(DescribeSource(source.needs.folder, *source.checkpoint));
  }
  HostWeightPlan plan = PlanHostWeights(needs, described, settings);
  RETURN_IF_ERROR(CheckHostWeightPlan(plan, settings));
  LogHostWeightPlan(plan);
  return plan;
}

absl::Status Agree(const PipelineOptions& options, const Device& device,
                   const std::vector<std::vector<HostBlock>>& rings) {
  std::vector<Setting> settings = options.agreement;
  settings.push_back({"device", device.kind() == DeviceKind::kCpu ? "cpu" : "cuda"});
  settings.push_back({"model.dtype", std::string(DTypeName(options.dtype))});
  settings.push_back(
      {"model.quantization", std::string(OnlineQuantizationName(options.quantization))});
  settings.push_back({"offload.slots", absl::StrCat(options.stream_slots)});
  for (size_t r = 0; r < rings.size(); ++r) {
    std::string digests;
    for (const HostBlock& block : rings[r]) {
      absl::StrAppend(&digests, absl::Hex(block.layout.digest(), absl::kZeroPad16));
    }
    settings.push_back({absl::StrCat("layout of ring ", r, "'s ", rings[r].size(), " blocks"),
                        std::move(digests)});
  }
  return AgreeOnSettings(*options.weight_group, settings);
}

absl::Status CheckOptions(const PipelineOptions& options) {
  if (options.dtype != DType::kF32 && options.dtype != DType::kBF16) {
    return absl::InvalidArgumentError(
        absl::StrCat("model.dtype is ", DTypeName(options.dtype), "; a model runs in F32 or BF16"));
  }
  if (options.quantization == OnlineQuantization::kOther) {
    return absl::InvalidArgumentError("model.quantization can only be none or fp8");
  }
  if (options.weight_group != nullptr && options.stream_slots == 0) {
    return absl::InvalidArgumentError("a weight group streams its blocks; set stream_slots");
  }
  if (options.resident_layers != 0 &&
      (options.weight_group != nullptr || options.stream_slots == 0)) {
    return absl::InvalidArgumentError(
        "resident layers are for blocks that are streamed whole: transfer rank-local");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<T5Tokenizer>> LoadTokenizer(const std::filesystem::path& root,
                                                           const WanConfig& config) {
  absl::StatusOr<std::unique_ptr<T5Tokenizer>> tokenizer = T5Tokenizer::Load(root / "tokenizer");
  if (!tokenizer.ok()) return Annotate(tokenizer.status(), "tokenizer");
  if ((*tokenizer)->vocab_size() > config.text_encoder.vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tokenizer: makes ids up to ", (*tokenizer)->vocab_size() - 1,
        ", but text_encoder/config.json has vocab_size ", config.text_encoder.vocab_size));
  }
  return tokenizer;
}

// As PipelineOptions say.
absl::StatusOr<int64_t> ResidentBlocks(const PipelineOptions& options, const WanConfig& config,
                                       const OffloadPlan& plan) {
  if (options.resident_layers != kResidentLayersAuto) {
    if (options.resident_layers <= config.transformer.num_layers) return options.resident_layers;
    return absl::InvalidArgumentError(
        absl::StrCat("offload.resident_layers is ", options.resident_layers,
                     ", but the transformer has ", config.transformer.num_layers, " blocks"));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<ModelCard> card, ReadModelCard(options.root));
  VideoSettings settings;
  card->Resolve({}, /*random_seed=*/0, &settings);
  return FitResidentBlocks(
      plan, WanActivationBytes(config, settings, options.dtype, options.quantization),
      options.stream_slots, options.device_memory_limit_bytes);
}

// A pipeline in the making; see models/model_startup.h. What Create finds out no attempt changes.
class WanBuilder : public ModelBuilder {
 public:
  static absl::StatusOr<std::unique_ptr<WanBuilder>> Create(const PipelineOptions& options) {
    RETURN_IF_ERROR(CheckOptions(options));
    ASSIGN_OR_RETURN(WanConfig config, ReadWanConfig(options.root));
    ASSIGN_OR_RETURN(const DeviceKind kind, ParseDeviceKind(options.device));
    if (kind == DeviceKind::kCpu) CountCpuTensors();
    if (options.threads > 0) at::set_num_threads(options.threads);
    ASSIGN_OR_RETURN(std::unique_ptr<T5Tokenizer> tokenizer, LoadTokenizer(options.root, config));
    OffloadPlan plan = WanOffloadPlan(config, options.dtype, options.quantization);
    RETURN_IF_ERROR(CheckOffloadPlan(plan, WanComponentNames(config)));
    ASSIGN_OR_RETURN(const int64_t resident_blocks, ResidentBlocks(options, config, plan));
    return std::unique_ptr<WanBuilder>(new WanBuilder(
        options, std::move(config), kind, std::move(tokenizer), std::move(plan), resident_blocks));
  }

  absl::Status Restore(const hwr::Lease& lease) override {
    return CatchTorch([&] { return MapWeights(lease); });
  }
  absl::Status Load(bool may_map) override {
    return CatchTorch([&] { return LoadWeights(may_map); });
  }
  absl::Status Enable(std::shared_ptr<const hwr::Lease> lease) override {
    return CatchTorch([&] { return MakeStreamer(std::move(lease)); });
  }

  void Discard() override {
    streamer_.reset();
    tokens_.reset();
    weights_.clear();
    lease_.reset();
    device_.reset();
    sources_.clear();
    backings_.clear();
    mapped_bytes_ = 0;
  }

  hwr::ArtifactLayout layout() const override {
    hwr::ArtifactLayout layout;
    for (const OffloadComponent& component : plan_.components) {
      layout.push_back(DescribeComponent(component.name, component.specs));
    }
    return layout;
  }
  absl::Status CopyPart(const std::string& component, int part, absl::Span<std::byte> to) override {
    const auto weights = weights_.find(component);
    if (weights == weights_.end()) {
      return absl::InvalidArgumentError(absl::StrCat("the model has no ", component));
    }
    return Annotate(weights->second.CopyPart(part, to), component);
  }
  const std::byte* part_data(const std::string& component, int part) override {
    return weights_.at(component).part_data(part);
  }

  int64_t read_bytes() const override { return read_bytes_; }
  int64_t mapped_bytes() const override { return mapped_bytes_; }
  int64_t pinned_bytes() const override {
    return device_ == nullptr ? 0 : device_->memory().host_bytes;
  }
  std::vector<HostBacking> backings() const override { return backings_; }

  // After Enable, once.
  std::unique_ptr<VideoPipeline> Finish() {
    Umt5Encoder text_encoder(config_.text_encoder, std::move(weights_.at("text_encoder")),
                             *std::move(tokens_));
    std::vector<WanTransformer> experts;
    experts.emplace_back(config_.transformer, std::move(weights_.at("transformer")));
    if (config_.transformer_2) {
      experts.emplace_back(*config_.transformer_2, std::move(weights_.at("transformer_2")));
    }
    std::optional<ComponentWeights> vae_weights = std::move(weights_.at("vae"));
    std::optional<WanVae> vae;
    if (!streams()) {
      vae.emplace(config_.vae, [&](const std::string& name) { return vae_weights->tensor(name); });
      vae_weights.reset();
    }
    return std::make_unique<WanPipeline>(WanComponents{.config = std::move(config_),
                                                       .device = std::move(device_),
                                                       .lease = std::move(lease_),
                                                       .weight_group = options_.weight_group,
                                                       .streamer = std::move(streamer_),
                                                       .tokenizer = std::move(tokenizer_),
                                                       .text_encoder = std::move(text_encoder),
                                                       .experts = std::move(experts),
                                                       .vae = std::move(vae),
                                                       .vae_weights = std::move(vae_weights),
                                                       .resident_blocks = resident_blocks_,
                                                       .rank = options_.rank});
  }

 private:
  WanBuilder(const PipelineOptions& options, WanConfig config, DeviceKind kind,
             std::unique_ptr<T5Tokenizer> tokenizer, OffloadPlan plan, int64_t resident_blocks)
      : options_(options),
        config_(std::move(config)),
        kind_(kind),
        tokenizer_(std::move(tokenizer)),
        plan_(std::move(plan)),
        resident_blocks_(resident_blocks) {}

  bool streams() const { return options_.stream_slots > 0; }

  // The checkpoint as it is now, and a device without weights.
  absl::Status Begin() {
    ASSIGN_OR_RETURN(device_, OpenDevice(kind_, 0));
    ASSIGN_OR_RETURN(sources_,
                     OpenSources(options_.root, config_, options_.dtype, options_.quantization));
    return absl::OkStatus();
  }

  WeightPlacement Placement(const OffloadComponent& component) const {
    WeightPlacement placement;
    if (!streams()) return placement;
    placement.kind =
        component.ring ? WeightPlacement::Kind::kStreamed : WeightPlacement::Kind::kStaged;
    if (component.ring && options_.weight_group != nullptr) {
      placement.shard = options_.weight_group->rank();
      placement.shards = options_.weight_group->size();
    }
    if (component.stage == ComponentStage::kDenoise) placement.resident_blocks = resident_blocks_;
    return placement;
  }

  int64_t HostBlockBytes(const HostWeightPlan& host_plan) const {
    int64_t bytes = 0;
    for (const OffloadComponent& component : plan_.components) {
      const ComponentPlan* mapped = host_plan.Find(component.name);
      // The kernel can take pages of a file back.
      bytes += mapped != nullptr && mapped->mapped()
                   ? mapped->cast_bytes
                   : ComponentWeights::HostBlockBytes(component.specs, Placement(component));
    }
    return bytes;
  }

  absl::Status MapWeights(const hwr::Lease& lease) {
    RETURN_IF_ERROR(Begin());
    for (const OffloadComponent& component : plan_.components) {
      const int index = lease.FindComponent(component.name);
      if (index < 0) {
        return absl::InternalError(absl::StrCat("the artifact has no ", component.name));
      }
      FinalParts parts = {.file = &lease.file(index)};
      const hwr::ArtifactComponent& layout = lease.layout()[index];
      for (int part = 0; part < static_cast<int>(layout.parts.size()); ++part) {
        parts.offsets.push_back(hwr::PartOffset(layout, part));
      }
      absl::StatusOr<ComponentWeights> weights = ComponentWeights::Map(
          std::move(parts), component.specs, *device_, options_.threads, Placement(component));
      if (!weights.ok()) return Annotate(weights.status(), component.name);
      weights_.emplace(component.name, *std::move(weights));
      backings_.push_back({.component = component.name, .backing = "artifact"});
    }
    mapped_bytes_ = lease.bytes();
    return MakeTokens();
  }

  absl::Status LoadWeights(bool may_map) {
    RETURN_IF_ERROR(Begin());
    ASSIGN_OR_RETURN(const HostWeightPlan host_plan, PlanSources(options_, sources_, may_map));
    if (streams()) RETURN_IF_ERROR(CheckHostMemory(options_, HostBlockBytes(host_plan)));
    for (size_t i = 0; i < plan_.components.size(); ++i) {
      const OffloadComponent& component = plan_.components[i];
      const ComponentPlan* planned = host_plan.Find(component.name);
      ASSIGN_OR_RETURN(ComponentWeights loaded,
                       LoadComponent(component, sources_[i], *device_, options_.threads,
                                     Placement(component), planned, &read_bytes_));
      weights_.emplace(component.name, std::move(loaded));
      HostBacking& backing = backings_.emplace_back(
          HostBacking{.component = component.name, .backing = streams() ? "memory" : "device"});
      if (planned == nullptr) continue;
      if (planned->mapped()) {
        backing.backing = "checkpoint";
        mapped_bytes_ += planned->mapped_bytes;
      } else {
        backing.reason = std::string(PlanRefusalName(planned->refusal));
        backing.message = planned->reason;
      }
    }
    return MakeTokens();
  }

  absl::Status MakeStreamer(std::shared_ptr<const hwr::Lease> lease) {
    lease_ = std::move(lease);
    if (!streams()) return absl::OkStatus();
    std::vector<std::vector<HostBlock>> rings;
    for (const OffloadComponent& component : plan_.components) {
      if (!component.ring) continue;
      rings.resize(std::max<size_t>(rings.size(), *component.ring + 1));
      rings[*component.ring] = weights_.at(component.name).host_blocks();
    }
    if (options_.weight_group != nullptr) RETURN_IF_ERROR(Agree(options_, *device_, rings));
    ASSIGN_OR_RETURN(streamer_, BlockStreamer::Create(
                                    *device_, std::move(rings),
                                    {.slots = options_.stream_slots, .recorder = options_.recorder},
                                    options_.weight_group.get()));
    if (lease_ != nullptr) RETURN_IF_ERROR(FetchFirst());
    // There is room for the slots; they come back with the first request.
    RETURN_IF_ERROR(streamer_->Stop());
    for (const OffloadComponent& component : plan_.components) {
      if (component.ring) weights_.at(component.name).StreamFrom(*streamer_, *component.ring);
    }
    return absl::OkStatus();
  }

  absl::Status MakeTokens() {
    for (size_t i = 0; i < plan_.components.size(); ++i) {
      if (plan_.components[i].stage != ComponentStage::kText) continue;
      ASSIGN_OR_RETURN(tokens_,
                       HostTable::Create(sources_[i].checkpoint,
                                         Umt5TokenTable(config_.text_encoder, options_.dtype)));
    }
    return absl::OkStatus();
  }

  // The first blocks of a default request, so that an artifact that cannot be read is not found out
  // by a user's.
  absl::Status FetchFirst() {
    ASSIGN_OR_RETURN(const std::unique_ptr<ModelCard> card, ReadModelCard(options_.root));
    VideoSettings settings;
    card->Resolve({}, /*random_seed=*/0, &settings);
    ASSIGN_OR_RETURN(VisitPlan plan, WanVisitPlan(config_, settings, resident_blocks_));
    RETURN_IF_ERROR(streamer_->Start(std::move(plan)));
    return streamer_->Acquire(kWanTextRing).status();
  }

  const PipelineOptions& options_;
  WanConfig config_;
  const DeviceKind kind_;
  std::unique_ptr<T5Tokenizer> tokenizer_;
  const OffloadPlan plan_;
  const int64_t resident_blocks_;

  // Of one attempt, in the order of their dependence.
  std::unique_ptr<Device> device_;
  std::shared_ptr<const hwr::Lease> lease_;
  std::vector<Source> sources_;
  std::map<std::string, ComponentWeights> weights_;
  std::optional<HostTable> tokens_;
  std::unique_ptr<BlockStreamer> streamer_;
  std::vector<HostBacking> backings_;
  std::atomic<int64_t> read_bytes_ = 0;  // of all attempts
  int64_t mapped_bytes_ = 0;
};

absl::StatusOr<std::unique_ptr<VideoPipeline>> Load(const PipelineOptions& options) {
  ASSIGN_OR_RETURN(const std::unique_ptr<WanBuilder> builder, WanBuilder::Create(options));
  ModelStartupOptions startup = {.root = options.root,
                                 .dtype = options.dtype,
                                 .quantization = options.quantization,
                                 .store = options.host_weights,
                                 .threads = options.threads,
                                 .on_state = options.on_startup_state};
  if (options.stream_slots == 0) {
    startup.direct = "all weights stay on the device";
  } else if (options.weight_group != nullptr) {
    startup.direct = "ranks share the weights of their group";
  }
  StartupReport report;
  RETURN_IF_ERROR(
      BuildModel(startup, *builder, options.report != nullptr ? options.report : &report));
  return builder->Finish();
}

}  // namespace

absl::StatusOr<std::unique_ptr<VideoPipeline>> LoadWanPipeline(const PipelineOptions& options) {
  return CatchTorch([&] { return Load(options); });
}

}  // namespace dlo
