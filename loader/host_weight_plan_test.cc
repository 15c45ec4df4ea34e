#include "loader/host_weight_plan.h"

#include <functional>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/test_folder.h"

namespace dlo {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// A model of two streamed components in two blocks each, and a component that is not streamed, with
// files that fit: what the cases below break in one place each.
struct Situation {
  std::vector<ComponentNeeds> needs;
  std::vector<WeightSource> sources;
  HostWeightSettings settings;

  ComponentNeeds& transformer() { return needs[1]; }
  WeightSource& files() { return sources[1]; }
  SourceTensor& tensor(const std::string& key) {
    for (SourceTensor& tensor : files().tensors) {
      if (tensor.key == key) return tensor;
    }
    std::abort();
  }
  void RemoveTensor(const std::string& key) {
    std::erase_if(files().tensors, [&](const SourceTensor& t) { return t.key == key; });
  }
  HostWeightPlan Plan() const { return PlanHostWeights(needs, sources, settings); }
};

// A source in which tensor i of `specs` is in file i % 2, stored as the spec asks.
WeightSource Store(const std::string& folder, const std::vector<TensorSpec>& specs) {
  WeightSource source;
  source.folder = folder;
  source.files = {{folder + "/1", 100}, {folder + "/2", 100}};
  for (size_t i = 0; i < specs.size(); ++i) {
    WeightSource::File& file = source.files[i % 2];
    source.tensors.push_back({.key = specs[i].name,
                              .file = static_cast<int>(i % 2),
                              .dtype = specs[i].dtype,
                              .shape = specs[i].shape,
                              .offset = file.bytes,
                              .bytes = specs[i].bytes()});
    file.bytes += specs[i].bytes();
  }
  return source;
}

Situation Fitting() {
  Situation s;
  for (const char* name : {"text_encoder", "transformer"}) {
    std::vector<TensorSpec> specs = {
        {.name = "embed", .shape = {8, 4}, .dtype = DType::kBF16, .aliases = {"shared"}}};
    for (int block = 0; block < 2; ++block) {
      const std::string prefix = absl::StrCat("blocks.", block, ".");
      specs.push_back(
          {.name = prefix + "qkv", .shape = {6, 4}, .dtype = DType::kBF16, .block = block});
      specs.push_back(
          {.name = prefix + "table", .shape = {1, 4}, .dtype = DType::kF32, .block = block});
    }
    s.sources.push_back(Store(name, specs));
    s.needs.push_back({.name = name, .folder = name, .streamed = true, .specs = specs});
  }
  const std::vector<TensorSpec> vae = {{.name = "conv", .shape = {3}, .dtype = DType::kF32}};
  s.needs.push_back({.name = "vae", .folder = "vae", .specs = vae});
  s.sources.push_back(Store("vae", vae));
  return s;
}

TEST(HostWeightPlan, BindsEachNeededTensorToItsBytesInItsFile) {
  const Situation s = Fitting();
  const HostWeightPlan plan = s.Plan();
  ASSERT_EQ(plan.components.size(), 2u);
  EXPECT_EQ(plan.Find("vae"), nullptr);
  const ComponentPlan* transformer = plan.Find("transformer");
  ASSERT_NE(transformer, nullptr);
  EXPECT_TRUE(transformer->mapped());
  ASSERT_EQ(transformer->bindings.size(), s.needs[1].specs.size());
  for (size_t i = 0; i < transformer->bindings.size(); ++i) {
    const WeightBinding& binding = transformer->bindings[i];
    const SourceTensor& tensor = s.sources[1].tensors[i];
    EXPECT_EQ(binding.name, s.needs[1].specs[i].name);
    EXPECT_EQ(binding.block, s.needs[1].specs[i].block);
    EXPECT_EQ(binding.key, tensor.key);
    EXPECT_EQ(binding.file, i % 2 == 0 ? "transformer/1" : "transformer/2");
    EXPECT_EQ(binding.offset, tensor.offset);
    EXPECT_EQ(binding.bytes, tensor.bytes);
    EXPECT_FALSE(binding.adaptation.has_value());
  }
  EXPECT_EQ(transformer->mapped_bytes, 2 * (6 * 4 * 2 + 4 * 4));
  EXPECT_EQ(transformer->cast_bytes, 0);
  EXPECT_EQ(transformer->num_files, 2);
  EXPECT_THAT(transformer->Text(), HasSubstr("transformer: blocks in the pages of 2 files"));
}

// Rearranges [6, 4] as a checkpoint's rows 3, 4, 5, 0, 1, 2.
class SwapHalves : public CheckpointAdapter {
 public:
  std::optional<Adaptation> Adapt(const TensorSpec& spec,
                                  const SourceTensor& source) const override {
    return Adaptation{.adapter = "swap/1", .runs = {{24, 0, 24}, {0, 24, 24}}};
  }
};

// An answer that does not add up.
class Answers : public CheckpointAdapter {
 public:
  explicit Answers(std::vector<ByteRun> runs) : runs_(std::move(runs)) {}
  std::optional<Adaptation> Adapt(const TensorSpec& spec,
                                  const SourceTensor& source) const override {
    return Adaptation{.adapter = "answers/1", .runs = runs_};
  }

 private:
  const std::vector<ByteRun> runs_;
};

struct RefusalCase {
  PlanRefusal refusal;
  const char* what;
  std::function<void(Situation&)> change;
  std::vector<std::string> said;  // in the reason
  bool whole = false;             // whether the text encoder is refused, too
};

void PrintTo(const RefusalCase& c, std::ostream* out) {
  *out << PlanRefusalName(c.refusal) << ": " << c.what;
}

std::vector<RefusalCase> RefusalCases() {
  return {
      {PlanRefusal::kTurnedOff,
       "off",
       [](Situation& s) { s.settings.mmap = CheckpointMmap::kOff; },
       {"host_weights.checkpoint_mmap is off"},
       true},
      {PlanRefusal::kCanonical,
       "an artifact is asked for",
       [](Situation& s) { s.settings.canonical = true; },
       {"host_weights.mode asks for an artifact"},
       true},
      {PlanRefusal::kTensorParallel,
       "tp 2",
       [](Situation& s) { s.settings.tp = 2; },
       {"parallel.tp is 2"},
       true},
      {PlanRefusal::kHsdp, "hsdp", [](Situation& s) { s.settings.hsdp = true; }, {"HSDP"}, true},
      {PlanRefusal::kOnlineQuantization,
       "online quantization",
       [](Situation& s) { s.transformer().specs[0].scale = "scale"; },
       {"quantised"}},
      {PlanRefusal::kRotatedInt8,
       "rotated INT8",
       [](Situation& s) { s.settings.rotated_int8 = true; },
       {"rotated"},
       true},
      {PlanRefusal::kAdapted,
       "LoRA",
       [](Situation& s) { s.settings.adapted = true; },
       {"LoRA"},
       true},
      {PlanRefusal::kNoFolder,
       "no folder of its own",
       [](Situation& s) { s.transformer().folder = ""; },
       {"no folder"}},
      {PlanRefusal::kSharedFolder,
       "in the folder of a component that is not streamed",
       [](Situation& s) {
         s.transformer().folder = "vae";
         s.sources.erase(s.sources.begin() + 1);
       },
       {"its folder vae also holds vae"}},
      {PlanRefusal::kNoSource,
       "folder unknown",
       [](Situation& s) { s.sources.erase(s.sources.begin() + 1); },
       {"transformer"}},
      {PlanRefusal::kUnreadable,
       "a file is missing or no safetensors",
       [](Situation& s) { s.files().status = absl::NotFoundError("no shard 2"); },
       {"no shard 2"}},
      {PlanRefusal::kEmptySource,
       "no tensors in the files",
       [](Situation& s) { s.files().tensors.clear(); },
       {"holds no tensors"}},
      {PlanRefusal::kNothingStreamed,
       "no blocks",
       [](Situation& s) { s.transformer().specs.resize(1); },
       {"no blocks"}},
      {PlanRefusal::kRepeated,
       "asked for twice",
       [](Situation& s) { s.transformer().specs[3].name = "blocks.0.qkv"; },
       {"1 in all: \"blocks.0.qkv\""}},
      {PlanRefusal::kDoubled,
       "in two files",
       [](Situation& s) {
         SourceTensor again = s.tensor("blocks.0.qkv");
         again.file = 1 - again.file;
         again.offset = 0;
         s.files().tensors.push_back(again);
       },
       {"two sources", "\"blocks.0.qkv\""}},
      {PlanRefusal::kDoubled,
       "under its name and its alias",
       [](Situation& s) {
         SourceTensor again = s.tensor("embed");
         again.key = "shared";
         s.files().tensors.push_back(again);
       },
       {"\"embed\" as \"embed\" and \"shared\""}},
      {PlanRefusal::kMissing,
       "a streamed tensor",
       [](Situation& s) { s.RemoveTensor("blocks.1.table"); },
       {"1 in all: \"blocks.1.table\""}},
      {PlanRefusal::kMissing,
       "a tensor outside the blocks",
       [](Situation& s) { s.RemoveTensor("embed"); },
       {"\"embed\""}},
      {PlanRefusal::kMissing,
       "many: the first are named and all are counted",
       [](Situation& s) {
         for (int i = 0; i < 60; ++i) {
           s.transformer().specs.push_back(
               {.name = absl::StrCat("more.", i), .shape = {1}, .block = 1});
         }
       },
       {"60 in all: \"more.0\", \"more.1\"", "..."}},
      {PlanRefusal::kUnexpected,
       "a tensor that is not the model's",
       [](Situation& s) {
         SourceTensor extra = s.tensor("embed");
         extra.key = "lora.up";
         s.files().tensors.push_back(extra);
       },
       {"1 in all: \"lora.up\""}},
      {PlanRefusal::kCustom,
       "loaded in the model's own way, and there is no adapter",
       [](Situation& s) { s.transformer().custom = {"blocks.1.qkv"}; },
       {"\"blocks.1.qkv\""}},
      {PlanRefusal::kCustom,
       "and the adapter has no answer",
       [](Situation& s) {
         s.transformer().custom = {"blocks.1.qkv"};
         s.transformer().adapter = std::make_shared<KeptFloat32Adapter>(DType::kBF16);
       },
       {"\"blocks.1.qkv\""}},
      {PlanRefusal::kOutsideFile,
       "beyond its file's end",
       [](Situation& s) { s.tensor("blocks.0.qkv").offset += 1000; },
       {"reach beyond", "\"blocks.0.qkv\" in transformer/2"}},
      {PlanRefusal::kOutsideFile,
       "in a file that is not listed",
       [](Situation& s) { s.tensor("blocks.0.qkv").file = 7; },
       {"\"blocks.0.qkv\""}},
      {PlanRefusal::kShape,
       "another shape of as many bytes",
       [](Situation& s) { s.tensor("blocks.0.qkv").shape = {4, 6}; },
       {"\"blocks.0.qkv\" is [4, 6] instead of [6, 4]"}},
      {PlanRefusal::kShape,
       "another shape outside the blocks",
       [](Situation& s) { s.tensor("embed").shape = {4, 8}; },
       {"\"embed\""}},
      {PlanRefusal::kDType,
       "another dtype of as many bytes",
       [](Situation& s) { s.tensor("blocks.0.qkv").dtype = DType::kF16; },
       {"\"blocks.0.qkv\" is F16, the run's BF16"}},
      {PlanRefusal::kDType,
       "wider than the run",
       [](Situation& s) {
         s.transformer().adapter = std::make_shared<KeptFloat32Adapter>(DType::kBF16);
         SourceTensor& tensor = s.tensor("blocks.0.qkv");
         tensor.dtype = DType::kF32;
         tensor.offset = 0;
         tensor.bytes *= 2;
       },
       {"is F32, the run's BF16"}},
      {PlanRefusal::kDType,
       "narrower than the run, which is float32",
       [](Situation& s) {
         s.transformer().adapter = std::make_shared<KeptFloat32Adapter>(DType::kF32);
         s.tensor("blocks.0.table").dtype = DType::kBF16;
       },
       {"is BF16, the run's F32"}},
      {PlanRefusal::kDType,
       "outside the blocks, and cannot be cast",
       [](Situation& s) { s.tensor("embed").dtype = DType::kI16; },
       {"\"embed\""}},
      {PlanRefusal::kBadAdaptation,
       "a byte twice",
       [](Situation& s) {
         s.transformer().custom = {"blocks.0.qkv"};
         s.transformer().adapter =
             std::make_shared<Answers>(std::vector<ByteRun>{{0, 0, 24}, {24, 20, 28}});
       },
       {"\"blocks.0.qkv\" by answers/1"}},
      {PlanRefusal::kBadAdaptation,
       "a byte never",
       [](Situation& s) {
         s.transformer().custom = {"blocks.0.qkv"};
         s.transformer().adapter = std::make_shared<Answers>(std::vector<ByteRun>{{0, 0, 47}});
       },
       {"answers/1"}},
      {PlanRefusal::kBadAdaptation,
       "a byte that the checkpoint's tensor does not have",
       [](Situation& s) {
         s.transformer().custom = {"blocks.0.qkv"};
         s.transformer().adapter = std::make_shared<Answers>(std::vector<ByteRun>{{1, 0, 48}});
       },
       {"answers/1"}},
  };
}

class Refusals : public testing::TestWithParam<RefusalCase> {};

TEST_P(Refusals, HaveTheirReasonAndTheComponentFallsBackWhole) {
  const RefusalCase& c = GetParam();
  Situation s = Fitting();
  c.change(s);
  const HostWeightPlan plan = s.Plan();
  const ComponentPlan* transformer = plan.Find("transformer");
  ASSERT_NE(transformer, nullptr);
  EXPECT_EQ(PlanRefusalName(transformer->refusal), PlanRefusalName(c.refusal))
      << transformer->reason;
  for (const std::string& text : c.said) EXPECT_THAT(transformer->reason, HasSubstr(text));
  EXPECT_FALSE(transformer->mapped());
  EXPECT_TRUE(transformer->bindings.empty());
  EXPECT_EQ(transformer->mapped_bytes, 0);
  EXPECT_THAT(transformer->Text(), AllOf(HasSubstr("transformer: blocks in private memory ("),
                                         HasSubstr(std::string(PlanRefusalName(c.refusal))),
                                         HasSubstr(transformer->reason)));
  // What holds one component back is no reason for another.
  EXPECT_EQ(plan.Find("text_encoder")->mapped(), !c.whole);

  EXPECT_TRUE(CheckHostWeightPlan(plan, s.settings).ok());
  HostWeightSettings must = s.settings;
  must.mmap = CheckpointMmap::kOn;
  const absl::Status status = CheckHostWeightPlan(plan, must);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("host_weights.checkpoint_mmap is on"),
                    HasSubstr("transformer: " + transformer->reason)));
}

INSTANTIATE_TEST_SUITE_P(Section62, Refusals, testing::ValuesIn(RefusalCases()));

TEST(HostWeightPlan, EveryRefusalHasACaseAndANameOfItsOwn) {
  std::set<PlanRefusal> covered = {PlanRefusal::kNone};
  for (const RefusalCase& c : RefusalCases()) covered.insert(c.refusal);
  std::set<std::string> names;
  for (int i = 0; i <= static_cast<int>(PlanRefusal::kBadAdaptation); ++i) {
    const auto refusal = static_cast<PlanRefusal>(i);
    EXPECT_TRUE(covered.contains(refusal)) << PlanRefusalName(refusal);
    EXPECT_FALSE(PlanRefusalName(refusal).empty()) << i;
    EXPECT_TRUE(names.insert(std::string(PlanRefusalName(refusal))).second) << i;
  }
}

TEST(HostWeightPlan, TheFirstReasonInTheOrderOfThePreflightIsGiven) {
  Situation s = Fitting();
  s.settings.tp = 2;
  s.settings.hsdp = true;
  s.RemoveTensor("embed");
  s.tensor("blocks.0.qkv").dtype = DType::kF16;
  EXPECT_EQ(s.Plan().Find("transformer")->refusal, PlanRefusal::kTensorParallel);
  s.settings = {};
  EXPECT_EQ(s.Plan().Find("transformer")->refusal, PlanRefusal::kMissing);
}

TEST(HostWeightPlan, IgnoredTensorsAreNotUnexpected) {
  Situation s = Fitting();
  SourceTensor extra = s.tensor("embed");
  extra.key = "blocks.0.norm_added_q.weight";
  s.files().tensors.push_back(extra);
  s.transformer().ignore_unexpected = {"norm_added_q"};
  EXPECT_TRUE(s.Plan().Find("transformer")->mapped());
}

TEST(HostWeightPlan, ATensorIsFoundByItsAlias) {
  Situation s = Fitting();
  s.tensor("embed").key = "shared";
  const HostWeightPlan plan = s.Plan();
  ASSERT_TRUE(plan.Find("transformer")->mapped());
  EXPECT_EQ(plan.Find("transformer")->bindings[0].name, "embed");
  EXPECT_EQ(plan.Find("transformer")->bindings[0].key, "shared");
}

// They are copied to the device once, by the ordinary loader.
TEST(HostWeightPlan, TensorsOutsideTheBlocksMayBeCast) {
  Situation s = Fitting();
  s.tensor("embed").dtype = DType::kF16;
  EXPECT_TRUE(s.Plan().Find("transformer")->mapped());
}

TEST(HostWeightPlan, SmallTensorsThatStayFloat32AreCastOnce) {
  Situation s = Fitting();
  s.transformer().adapter = std::make_shared<KeptFloat32Adapter>(DType::kBF16);
  for (const char* key : {"blocks.0.table", "blocks.1.table"}) {
    s.tensor(key).dtype = DType::kBF16;
    s.tensor(key).bytes = 8;
  }
  const HostWeightPlan plan = s.Plan();
  const ComponentPlan& transformer = *plan.Find("transformer");
  ASSERT_TRUE(transformer.mapped()) << transformer.reason;
  EXPECT_EQ(transformer.cast_bytes, 2 * 16);
  EXPECT_EQ(transformer.mapped_bytes, 2 * 48);
  ASSERT_TRUE(transformer.bindings[2].adaptation.has_value());
  EXPECT_EQ(transformer.bindings[2].adaptation->adapter, "kept-float32/1");
  EXPECT_FALSE(transformer.bindings[1].adaptation.has_value());
}

TEST(HostWeightPlan, AnAdapterRearrangesWhatTheModelLoadsInItsOwnWay) {
  Situation s = Fitting();
  s.transformer().custom = {"blocks.0.qkv", "blocks.1.qkv"};
  s.transformer().adapter = std::make_shared<SwapHalves>();
  const HostWeightPlan plan = s.Plan();
  const ComponentPlan& transformer = *plan.Find("transformer");
  ASSERT_TRUE(transformer.mapped()) << transformer.reason;
  EXPECT_EQ(transformer.bindings[1].adaptation->adapter, "swap/1");
  EXPECT_EQ(transformer.mapped_bytes, 2 * (48 + 16));
}

TEST(HostWeightPlan, SourcesAreDescribedFromTheirHeaders) {
  TempFolder folder;
  const std::string bytes(24, 'x');
  const auto data = absl::MakeConstSpan(reinterpret_cast<const std::byte*>(bytes.data()), 24);
  ASSERT_TRUE(WriteSafetensors(folder / "model.safetensors",
                               {{"b", DType::kBF16, {3, 4}, data}, {"a", DType::kF32, {0}, {}}})
                  .ok());
  auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const WeightSource source = DescribeSource("x", *checkpoint);
  EXPECT_EQ(source.folder, "x");
  ASSERT_EQ(source.files.size(), 1u);
  EXPECT_EQ(source.files[0].path, (folder / "model.safetensors").native());
  EXPECT_EQ(source.files[0].bytes,
            static_cast<int64_t>(std::filesystem::file_size(source.files[0].path)));
  ASSERT_EQ(source.tensors.size(), 2u);
  EXPECT_EQ(source.tensors[1].key, "b");
  EXPECT_EQ(source.tensors[1].dtype, DType::kBF16);
  EXPECT_EQ(source.tensors[1].shape, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(source.tensors[1].bytes, 24);
  EXPECT_EQ(source.tensors[1].offset + 24, source.files[0].bytes);
}

TEST(CheckpointMmapSetting, NamesAndValuesMatch) {
  for (CheckpointMmap mmap : {CheckpointMmap::kAuto, CheckpointMmap::kOn, CheckpointMmap::kOff}) {
    EXPECT_EQ(*ParseCheckpointMmap(CheckpointMmapName(mmap)), mmap);
  }
  EXPECT_THAT(std::string(ParseCheckpointMmap("yes").status().message()),
              AllOf(HasSubstr("\"yes\""), HasSubstr("\"auto\""), Not(HasSubstr("\"\""))));
}

}  // namespace
}  // namespace dlo
