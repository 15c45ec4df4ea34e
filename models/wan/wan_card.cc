#include "models/wan/wan_card.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "base/utf8.h"

namespace dlo {
namespace {

// diffusers refuses sizes off this grid whatever the model's patch is.
constexpr int64_t kSizeMultiple = 16;
// See wan_config.cc: within these, no two noise levels of a grid coincide in float32.
constexpr double kShiftMin = 0.01;
constexpr double kShiftMax = 100;
// A CPU generator uses no more of it, so a drawn seed says all there is to say about the noise.
constexpr uint64_t kSeedMask = 0xffffffff;

struct SolverName {
  absl::string_view name;
  FlowSchedulerConfig::Solver solver;
  SigmaGrid grid;
};

constexpr SolverName kSolvers[] = {
    {"unipc", FlowSchedulerConfig::Solver::kUniPC, SigmaGrid::kUniPC},
    {"unipc-legacy", FlowSchedulerConfig::Solver::kUniPC, SigmaGrid::kUniPCLegacy},
    {"euler", FlowSchedulerConfig::Solver::kEuler, SigmaGrid::kEuler},
    {"euler-native", FlowSchedulerConfig::Solver::kEuler, SigmaGrid::kEulerNative},
};

const SolverName* FindSolver(absl::string_view name) {
  for (const SolverName& solver : kSolvers) {
    if (solver.name == name) return &solver;
  }
  return nullptr;
}

std::string SolverNames() {
  return absl::StrJoin(kSolvers, ", ", [](std::string* out, const SolverName& solver) {
    absl::StrAppend(out, solver.name);
  });
}

std::string DefaultSolver(const FlowSchedulerConfig& config) {
  for (const SolverName& solver : kSolvers) {
    if (solver.solver == config.solver && solver.grid == config.grid)
      return std::string(solver.name);
  }
  return "";
}

// Collects the wrong fields of one request.
class Checker {
 public:
  explicit Checker(std::vector<FieldViolation>* wrong) : wrong_(wrong) {}

  void Fail(absl::string_view field, std::string description) {
    wrong_->push_back({absl::StrCat("settings.", field), std::move(description)});
  }

  // Both return false, with a violation, for a value outside [min, max].
  bool Int(absl::string_view field, int64_t value, int64_t min, int64_t max) {
    if (value >= min && value <= max) return true;
    Fail(field, absl::StrCat(field, " is ", value, ", but must be from ", min, " to ", max));
    return false;
  }
  bool Double(absl::string_view field, double value, double min, double max) {
    if (std::isfinite(value) && value >= min && value <= max) return true;
    Fail(field, absl::StrCat(field, " is ", value, ", but must be a finite number from ", min,
                             " to ", max));
    return false;
  }

 private:
  std::vector<FieldViolation>* wrong_;
};

// Floors `pixels` to a multiple of `multiple`, or returns 0 with a violation. `max` is the largest
// valid result.
int64_t ResolveSize(absl::string_view field, int64_t pixels, int64_t multiple, int64_t max,
                    Checker& check) {
  if (!check.Int(field, pixels, multiple, max)) return 0;
  if (pixels % kSizeMultiple != 0) {
    const int64_t below = pixels / kSizeMultiple * kSizeMultiple;
    check.Fail(field,
               absl::StrCat(field, " is ", pixels, ", but must be a multiple of ", kSizeMultiple,
                            "; the nearest are ", below, " and ", below + kSizeMultiple));
    return 0;
  }
  return pixels / multiple * multiple;
}

template <typename T>
T Or(const std::optional<T>& requested, const std::optional<T>& fallback) {
  return requested ? *requested : *fallback;
}

template <typename T>
void Override(const std::optional<T>& value, std::optional<T>& out) {
  if (value) out = value;
}

// The folder's name; in the Hugging Face cache (models--OWNER--NAME/snapshots/COMMIT) the
// repository's.
std::string RepositoryName(const std::filesystem::path& root) {
  std::error_code error;
  std::filesystem::path folder = std::filesystem::weakly_canonical(root, error);
  if (error) folder = root;
  if (!folder.has_filename()) folder = folder.parent_path();
  const std::string cached = folder.parent_path().parent_path().filename().string();
  if (folder.parent_path().filename() == "snapshots" && absl::StartsWith(cached, "models--")) {
    return absl::StrReplaceAll(cached.substr(8), {{"--", "/"}});
  }
  return folder.filename().string();
}

absl::StatusOr<RequestedSettings> ReadDefaults(const std::filesystem::path& path,
                                               RequestedSettings defaults) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return defaults;
  ASSIGN_OR_RETURN(const nlohmann::json document, ReadJsonFile(path));
  JsonReader reader(path.string(), document);
  // Types only: WanCard::Create checks the values as it checks a request's.
  constexpr int64_t kIntMax = std::numeric_limits<int32_t>::max();
  constexpr double kDoubleMax = 1e12;
  RequestedSettings file;
  reader.OptionalInt("width", 0, kIntMax, &file.width);
  reader.OptionalInt("height", 0, kIntMax, &file.height);
  reader.OptionalInt("num_frames", 0, kIntMax, &file.num_frames);
  reader.OptionalDouble("fps", 0, kDoubleMax, &file.fps);
  reader.OptionalInt("num_inference_steps", 0, kIntMax, &file.num_inference_steps);
  reader.OptionalDouble("guidance_scale", 0, kDoubleMax, &file.guidance_scale);
  reader.OptionalDouble("guidance_scale_2", 0, kDoubleMax, &file.guidance_scale_2);
  reader.OptionalDouble("flow_shift", 0, kDoubleMax, &file.flow_shift);
  std::string solver;
  reader.String("solver", &solver);
  if (reader.has("solver")) file.solver = solver;
  RETURN_IF_ERROR(reader.Finish());

  Override(file.width, defaults.width);
  Override(file.height, defaults.height);
  Override(file.num_frames, defaults.num_frames);
  Override(file.fps, defaults.fps);
  Override(file.num_inference_steps, defaults.num_inference_steps);
  Override(file.guidance_scale, defaults.guidance_scale);
  Override(file.guidance_scale_2, defaults.guidance_scale_2);
  Override(file.flow_shift, defaults.flow_shift);
  Override(file.solver, defaults.solver);
  return defaults;
}

}  // namespace

RequestedSettings WanFamilyDefaults(const WanConfig& config) {
  RequestedSettings defaults;
  defaults.width = 832;
  defaults.height = 480;
  defaults.num_frames = 81;
  defaults.fps = 16;
  defaults.num_inference_steps = 50;
  defaults.guidance_scale = 5;
  if (config.transformer_2) {
    defaults.num_inference_steps = 40;
    defaults.guidance_scale = 4;
    defaults.guidance_scale_2 = 3;
  } else if (config.expand_timesteps) {
    defaults.width = 1280;
    defaults.height = 704;
    defaults.num_frames = 121;
    defaults.fps = 24;
  }
  defaults.flow_shift = config.scheduler.shift;
  defaults.solver = DefaultSolver(config.scheduler);
  return defaults;
}

WanCard::WanCard(std::string name, WanConfig config, const RequestedSettings& defaults,
                 const WanLimits& limits)
    : name_(std::move(name)), config_(std::move(config)), defaults_(defaults), limits_(limits) {}

absl::StatusOr<std::unique_ptr<WanCard>> WanCard::Create(std::string name, WanConfig config,
                                                         const RequestedSettings& defaults,
                                                         const WanLimits& limits) {
  auto card =
      std::unique_ptr<WanCard>(new WanCard(std::move(name), std::move(config), defaults, limits));
  VideoSettings ignored;
  const std::vector<FieldViolation> wrong = card->Resolve(RequestedSettings{}, 0, &ignored);
  if (!wrong.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the defaults of this model cannot run: ",
        absl::StrJoin(wrong, "; ", [](std::string* out, const FieldViolation& violation) {
          absl::StrAppend(out, violation.description);
        })));
  }
  return card;
}

std::vector<FieldViolation> WanCard::Resolve(const RequestedSettings& requested,
                                             uint64_t random_seed, VideoSettings* resolved) const {
  std::vector<FieldViolation> wrong;
  Checker check(&wrong);
  *resolved = VideoSettings{};

  // Sizes. One position of rotary embedding for each patch along an axis.
  const WanTransformerConfig& transformer = config_.transformer;
  int64_t positions = transformer.rope_max_seq_len;
  if (config_.transformer_2) {
    positions = std::min(positions, config_.transformer_2->rope_max_seq_len);
  }
  const int64_t row_pixels = config_.vae.scale_factor_spatial * transformer.patch_size[1];
  const int64_t column_pixels = config_.vae.scale_factor_spatial * transformer.patch_size[2];
  const int64_t height = ResolveSize("height", Or(requested.height, defaults_.height), row_pixels,
                                     std::min(limits_.pixels_max, positions * row_pixels), check);
  const int64_t width = ResolveSize("width", Or(requested.width, defaults_.width), column_pixels,
                                    std::min(limits_.pixels_max, positions * column_pixels), check);

  const int64_t temporal = config_.vae.scale_factor_temporal;
  const int64_t frames_max = (positions - 1) * temporal + 1;
  int64_t num_frames = Or(requested.num_frames, defaults_.num_frames);
  bool frames_valid = check.Int("num_frames", num_frames, 1, frames_max);
  if (frames_valid && temporal > 1 && num_frames % temporal != 1) {
    // May only exceed the maximum where the request already did, as frames_max is a multiple plus
    // one.
    num_frames = num_frames / temporal * temporal + 1;
  }

  if (height > 0 && width > 0 && frames_valid) {
    const int64_t tokens =
        ((num_frames - 1) / temporal + 1) * (height / row_pixels) * (width / column_pixels);
    if (tokens > limits_.tokens_max) {
      check.Fail("num_frames",
                 absl::StrCat(num_frames, " frames of ", width, "x", height, " make ", tokens,
                              " tokens, but at most ", limits_.tokens_max,
                              " are allowed; ask for fewer frames or a smaller size"));
    }
  }
  resolved->height = static_cast<int>(height);
  resolved->width = static_cast<int>(width);
  resolved->num_frames = static_cast<int>(frames_valid ? num_frames : 0);

  resolved->fps = Or(requested.fps, defaults_.fps);
  if (!(std::isfinite(resolved->fps) && resolved->fps > 0 && resolved->fps <= limits_.fps_max)) {
    check.Fail("fps",
               absl::StrCat("fps is ", resolved->fps,
                            ", but must be a finite number above 0 and at most ", limits_.fps_max));
  }

  const int64_t steps = Or(requested.num_inference_steps, defaults_.num_inference_steps);
  if (check.Int("num_inference_steps", steps, 1, limits_.num_inference_steps_max)) {
    resolved->num_inference_steps = static_cast<int>(steps);
  }

  resolved->guidance_scale = Or(requested.guidance_scale, defaults_.guidance_scale);
  check.Double("guidance_scale", resolved->guidance_scale, 0, limits_.guidance_scale_max);
  if (config_.transformer_2) {
    std::optional<double> second = requested.guidance_scale_2;
    if (!second && !requested.guidance_scale) second = defaults_.guidance_scale_2;
    resolved->guidance_scale_2 = second.value_or(resolved->guidance_scale);
    // Repeating the first scale's violation under another name would tell the client nothing.
    if (second) {
      check.Double("guidance_scale_2", *second, 0, limits_.guidance_scale_max);
    }
  } else if (requested.guidance_scale_2 || defaults_.guidance_scale_2) {
    check.Fail("guidance_scale_2",
               absl::StrCat("guidance_scale_2 is ",
                            Or(requested.guidance_scale_2, defaults_.guidance_scale_2),
                            ", but this model has no second expert; leave it unset"));
  }

  resolved->flow_shift = Or(requested.flow_shift, defaults_.flow_shift);
  check.Double("flow_shift", resolved->flow_shift, kShiftMin, kShiftMax);

  resolved->solver = Or(requested.solver, defaults_.solver);
  if (FindSolver(resolved->solver) == nullptr) {
    check.Fail("solver",
               absl::StrCat("solver is \"", absl::CHexEscape(resolved->solver.substr(0, 64)),
                            "\", but must be one of ", SolverNames()));
  }

  resolved->seed = requested.seed.value_or(random_seed & kSeedMask);
  return wrong;
}

std::vector<FieldViolation> WanCard::CheckPrompts(const std::string& prompt,
                                                  const std::string& negative_prompt) const {
  std::vector<FieldViolation> wrong;
  const auto check = [&](absl::string_view field, const std::string& text) {
    if (static_cast<int64_t>(text.size()) > limits_.prompt_bytes_max) {
      wrong.push_back(
          {std::string(field), absl::StrCat(field, " has ", text.size(), " bytes, but at most ",
                                            limits_.prompt_bytes_max, " are allowed; shorten it")});
    } else if (const size_t pos = FindInvalidUtf8(text); pos != absl::string_view::npos) {
      wrong.push_back({std::string(field), absl::StrCat(field, " is not valid UTF-8 at byte ", pos,
                                                        "; send text encoded as UTF-8")});
    }
  };
  if (absl::StripAsciiWhitespace(prompt).empty()) {
    wrong.push_back({"prompt", "prompt is empty; say what the video should show"});
  } else {
    check("prompt", prompt);
  }
  check("negative_prompt", negative_prompt);
  return wrong;
}

absl::StatusOr<std::unique_ptr<ModelCard>> ReadWanCard(const std::filesystem::path& root,
                                                       const WanLimits& limits) {
  ASSIGN_OR_RETURN(WanConfig config, ReadWanConfig(root));
  const std::filesystem::path file = root / "dlo.json";
  ASSIGN_OR_RETURN(const RequestedSettings defaults, ReadDefaults(file, WanFamilyDefaults(config)));
  absl::StatusOr<std::unique_ptr<WanCard>> card =
      WanCard::Create(RepositoryName(root), std::move(config), defaults, limits);
  if (!card.ok()) {
    return absl::Status(card.status().code(),
                        absl::StrCat(file.string(), ": ", card.status().message()));
  }
  return *std::move(card);
}

absl::StatusOr<FlowSchedulerConfig> ResolveScheduler(const FlowSchedulerConfig& repository,
                                                     const VideoSettings& settings) {
  const SolverName* solver = FindSolver(settings.solver);
  if (solver == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("solver is \"",
                                                   absl::CHexEscape(settings.solver),
                                                   "\", but must be one of ", SolverNames()));
  }
  FlowSchedulerConfig config = repository;
  config.solver = solver->solver;
  config.grid = solver->grid;
  config.shift = settings.flow_shift;
  return config;
}

}  // namespace dlo
