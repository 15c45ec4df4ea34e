#include "loader/hwr/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "base/sha256.h"
#include "loader/hwr/store_testing.h"
#include "nlohmann/json.hpp"

namespace dlo::hwr {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

Manifest Sample() {
  Manifest manifest;
  manifest.layout = SmallLayout();
  manifest.identity = SmallIdentity();
  manifest.part_digests = {{Sha256Of("0"), Sha256Of("1"), Sha256Of("2")}, {Sha256Of("3")}};
  return manifest;
}

TEST(LayoutTest, PartsStartAtPages) {
  const ArtifactLayout layout = SmallLayout();
  ASSERT_TRUE(CheckLayout(layout).ok());
  EXPECT_EQ(PartOffset(layout[0], 0), 0);
  EXPECT_EQ(PartOffset(layout[0], 1), 4096);
  EXPECT_EQ(PartOffset(layout[0], 2), 4096 + 8192);
  EXPECT_EQ(PayloadBytes(layout[0]), 4096 + 8192 + 8192);
  EXPECT_EQ(PayloadBytes(layout), 4096 + 8192 + 8192 + 4096);
  EXPECT_EQ(PayloadName(layout[0]), "transformer.bin");
}

TEST(LayoutTest, RefusesWhatCannotBeLaidOut) {
  const std::vector<std::pair<const char*, std::function<void(ArtifactLayout&)>>> changes = {
      {"no component", [](ArtifactLayout& l) { l.clear(); }},
      {"no name", [](ArtifactLayout& l) { l[0].name = std::string("../up"); }},
      {"no name", [](ArtifactLayout& l) { l[0].name = std::string(""); }},
      {"no name", [](ArtifactLayout& l) { l[0].name = std::string(101, 'a'); }},
      {"comes twice", [](ArtifactLayout& l) { l[1].name = std::string("transformer"); }},
      {"comes twice",
       [](ArtifactLayout& l) { l[0].parts[2].tensors[0].name = std::string("blocks.0.w"); }},
      {"no name", [](ArtifactLayout& l) { l[0].parts[0].tensors[0].name = std::string("\xff"); }},
      {"do not fit", [](ArtifactLayout& l) { l[0].parts[0].tensors[0].bytes = 28; }},
      {"do not fit", [](ArtifactLayout& l) { l[0].parts[0].tensors[0].shape = {-2, -3}; }},
      {"do not fit",
       [](ArtifactLayout& l) {
         l[0].parts[0].tensors[0].shape = {int64_t{1} << 40, int64_t{1} << 40};
       }},
      {"at 16", [](ArtifactLayout& l) { l[0].parts[0].tensors[1].offset = 16; }},
      {"at -1", [](ArtifactLayout& l) { l[0].parts[0].tensors[0].offset = -1; }},
      {"in a part of", [](ArtifactLayout& l) { l[0].parts[1].bytes = 5999; }},
      {"a part of -1", [](ArtifactLayout& l) { l[0].parts[1].bytes = -1; }},
      {"too large",
       [](ArtifactLayout& l) {
         for (ArtifactPart& part : l[0].parts) part.bytes = int64_t{1} << 60;
       }},
      {"no tensor", [](ArtifactLayout& l) { l[1].parts.clear(); }},
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    ArtifactLayout layout = SmallLayout();
    changes[i].second(layout);
    const absl::Status status = CheckLayout(layout);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << i;
    EXPECT_THAT(status.message(), HasSubstr(changes[i].first)) << i;
  }
}

TEST(LayoutTest, TheDigestTellsLayoutsApart) {
  const std::vector<std::function<void(ArtifactLayout&)>> changes = {
      [](ArtifactLayout& l) { l[0].name = std::string("transformer_2"); },
      [](ArtifactLayout& l) { l[0].parts[0].tensors[0].name = std::string("proj2"); },
      [](ArtifactLayout& l) { l[0].parts[0].tensors[0].shape = {3, 2}; },
      [](ArtifactLayout& l) { l[0].parts[0].tensors[0].dtype = DType::kI32; },
      [](ArtifactLayout& l) { l[0].parts[0].tensors[1].offset = 258; },
      [](ArtifactLayout& l) { l[0].parts[0].bytes = 768; },
      [](ArtifactLayout& l) { std::swap(l[0], l[1]); }};
  for (size_t i = 0; i < changes.size(); ++i) {
    ArtifactLayout layout = SmallLayout();
    changes[i](layout);
    ASSERT_TRUE(CheckLayout(layout).ok()) << i;
    EXPECT_NE(LayoutDigest(layout), LayoutDigest(SmallLayout())) << i;
  }
}

TEST(ManifestTest, ReadsBackWhatWasWritten) {
  const Manifest manifest = Sample();
  const std::string bytes = WriteManifest(manifest);
  const absl::StatusOr<Manifest> again = ParseManifest(bytes);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->identity.document, manifest.identity.document);
  EXPECT_EQ(again->layout, manifest.layout);
  EXPECT_EQ(again->part_digests, manifest.part_digests);
  EXPECT_EQ(WriteManifest(*again), bytes);
  EXPECT_TRUE(CheckReady(WriteReady(bytes, manifest), bytes, manifest).ok());
}

TEST(ManifestTest, RefusesEveryChangeOfAnyOneValue) {
  const json whole = json::parse(WriteManifest(Sample()));
  int changed = 0;
  const std::function<void(const json::json_pointer&)> visit = [&](const json::json_pointer& at) {
    const json& value = whole[at];
    if (value.is_structured() && !value.empty()) {
      for (const auto& [key, ignored] : value.items()) {
        visit(value.is_array() ? at / static_cast<size_t>(std::stoul(key)) : at / key);
      }
    }
    // Each value by one of every type, and by nothing.
    for (const json& other : {json(nullptr), json(true), json(7), json(-1), json(1.5), json("x"),
                              json::array(), json::object()}) {
      if (at.empty() || other == value) continue;
      json document = whole;
      document[at] = other;
      const absl::Status status = ParseManifest(document.dump()).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument)
          << at.to_string() << " = " << other << ": " << status;
      ++changed;
    }
    if (value.is_object()) {
      json document = whole;
      document[at]["more"] = 1;
      EXPECT_FALSE(ParseManifest(document.dump()).ok()) << at.to_string();
    }
    if (!at.empty() && whole[at.parent_pointer()].is_object()) {
      json document = whole;
      document[at.parent_pointer()].erase(at.back());
      EXPECT_FALSE(ParseManifest(document.dump()).ok()) << at.to_string();
    }
  };
  visit(json::json_pointer());
  EXPECT_GT(changed, 300);
}

TEST(ManifestTest, RefusesBytesThatAreNotAsWritten) {
  const std::string bytes = WriteManifest(Sample());
  EXPECT_FALSE(ParseManifest("").ok());
  EXPECT_FALSE(ParseManifest("null").ok());
  EXPECT_FALSE(ParseManifest(bytes + "\n").ok());
  EXPECT_FALSE(ParseManifest(bytes.substr(0, bytes.size() - 1)).ok());
  EXPECT_FALSE(ParseManifest(json::parse(bytes).dump(2)).ok());
  for (size_t at = 0; at < bytes.size(); at += 7) {
    std::string flipped = bytes;
    flipped[at] ^= 1;
    EXPECT_FALSE(ParseManifest(flipped).ok()) << at;
  }
}

TEST(ReadyTest, IsThatOfOneManifestOnly) {
  const Manifest manifest = Sample();
  const std::string bytes = WriteManifest(manifest);
  const std::string ready = WriteReady(bytes, manifest);
  EXPECT_FALSE(CheckReady("", bytes, manifest).ok());
  EXPECT_FALSE(CheckReady(ready + " ", bytes, manifest).ok());
  Manifest other = manifest;
  other.part_digests[0][0] = Sha256Of("another");
  EXPECT_FALSE(CheckReady(ready, WriteManifest(other), other).ok());
  for (size_t at = 0; at < ready.size(); ++at) {
    std::string flipped = ready;
    flipped[at] ^= 1;
    EXPECT_FALSE(CheckReady(flipped, bytes, manifest).ok()) << at;
  }
}

}  // namespace
}  // namespace dlo::hwr
