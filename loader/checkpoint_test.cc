#include "loader/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "loader/test_folder.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// A file with one-byte tensors of these names; each holds its name's first letter.
void WriteShard(const fs::path& path, const std::vector<std::string>& names) {
  std::vector<SafetensorsTensor> tensors;
  tensors.reserve(names.size());
  for (const std::string& name : names) {
    tensors.push_back({name, DType::kU8, {1}, AsBytes(name).subspan(0, 1)});
  }
  fs::create_directories(path.parent_path());
  ASSERT_TRUE(WriteSafetensors(path, tensors).ok());
}

std::string Index(const std::vector<std::pair<std::string, std::string>>& weight_map) {
  std::string json = R"({"metadata":{"total_size":1.5e3,"x":[1,null]},"weight_map":{)";
  for (size_t i = 0; i < weight_map.size(); ++i) {
    absl::StrAppend(&json, i == 0 ? "" : ",", "\"", weight_map[i].first, "\":\"",
                    weight_map[i].second, "\"");
  }
  return json + "}}";
}

constexpr char kIndex[] = "diffusion_pytorch_model.safetensors.index.json";

std::string MessageOf(const absl::StatusOr<Checkpoint>& checkpoint) {
  return std::string(checkpoint.status().message());
}

TEST(CheckpointTest, OpensASingleFileOfEitherName) {
  for (const char* name : {"diffusion_pytorch_model.safetensors", "model.safetensors"}) {
    TempFolder folder;
    WriteShard(folder / name, {"b", "a"});
    auto checkpoint = Checkpoint::Open(folder.path());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_THAT(checkpoint->names(), ElementsAre("a", "b"));
    auto source = checkpoint->Find("b");
    ASSERT_TRUE(source.has_value());
    EXPECT_EQ(source->dtype, DType::kU8);
    EXPECT_EQ(source->shape, absl::Span<const int64_t>({1}));
    ASSERT_EQ(source->data.size(), 1u);
    EXPECT_EQ(source->data[0], std::byte{'b'});
    EXPECT_EQ(std::string(source->file), (folder / name).native());
    EXPECT_FALSE(checkpoint->Find("c").has_value());
  }
}

TEST(CheckpointTest, JoinsShardsOfAnyNameWithTensorsScatteredOverThem) {
  for (const char* index : {kIndex, "model.safetensors.index.json"}) {
    TempFolder folder;
    WriteShard(folder / "weights, part two", {"a", "d"});
    WriteShard(folder / "..odd", {"c"});
    WriteShard(folder / "sub/x.bin", {"b"});
    ASSERT_EQ(chmod((folder / "..odd").c_str(), 0600), 0);
    folder.Write(index, Index({{"c", "..odd"},
                               {"b", "sub/x.bin"},
                               {"a", "weights, part two"},
                               {"d", "weights, part two"}}));
    auto opened = Checkpoint::Open(folder.path());
    ASSERT_TRUE(opened.ok()) << opened.status();
    const Checkpoint checkpoint = *std::move(opened);  // spans and names survive the move
    EXPECT_EQ(checkpoint.files().size(), 3u);
    EXPECT_THAT(checkpoint.names(), ElementsAre("a", "b", "c", "d"));
    for (const char* name : {"a", "b", "c", "d"}) {
      ASSERT_TRUE(checkpoint.Find(name).has_value());
      EXPECT_EQ(checkpoint.Find(name)->data[0], static_cast<std::byte>(name[0]));
    }
    EXPECT_EQ(std::string(checkpoint.Find("c")->file), (folder / "..odd").native());
  }
}

// A snapshot of the Hugging Face cache consists of links into a folder beside it.
TEST(CheckpointTest, FollowsLinksOutOfTheFolder) {
  TempFolder folder;
  WriteShard(folder / "blobs/1", {"a"});
  folder.Write("blobs/2", Index({{"a", "s.safetensors"}}));
  fs::create_directories(folder / "snapshot");
  fs::create_symlink("../blobs/1", folder / "snapshot/s.safetensors");
  fs::create_symlink("../blobs/2", folder / absl::StrCat("snapshot/", kIndex));
  auto checkpoint = Checkpoint::Open(folder / "snapshot");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(checkpoint->names(), ElementsAre("a"));
}

TEST(CheckpointTest, ReadsAnIndexBeforeASingleFile) {
  TempFolder folder;
  WriteShard(folder / "diffusion_pytorch_model.safetensors", {"old"});
  WriteShard(folder / "s", {"new"});
  folder.Write(kIndex, Index({{"new", "s"}}));
  auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(checkpoint->names(), ElementsAre("new"));
}

TEST(CheckpointTest, NamesTheFilesItLookedFor) {
  TempFolder folder;
  auto none = Checkpoint::Open(folder / "transformer");
  EXPECT_EQ(none.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(MessageOf(none), HasSubstr((folder / "transformer").native()));

  auto empty = Checkpoint::Open(folder.path());
  EXPECT_EQ(empty.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(MessageOf(empty), AllOf(HasSubstr(folder.path().native()),
                                      HasSubstr("diffusion_pytorch_model.safetensors"),
                                      HasSubstr("model.safetensors"), HasSubstr(".index.json")));
}

TEST(CheckpointTest, AnUnfinishedDownloadFailsWithTheNameOfTheDanglingLink) {
  for (const char* name : {"model.safetensors", kIndex}) {
    TempFolder folder;
    fs::create_symlink("../blobs/gone", folder / name);
    auto checkpoint = Checkpoint::Open(folder.path());
    EXPECT_EQ(checkpoint.status().code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(MessageOf(checkpoint), HasSubstr((folder / name).native()));
  }
}

TEST(CheckpointTest, MissingShardNamesShardAndIndex) {
  TempFolder folder;
  folder.Write(kIndex, Index({{"a", "shard-1"}}));
  auto checkpoint = Checkpoint::Open(folder.path());
  EXPECT_EQ(checkpoint.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(MessageOf(checkpoint),
              AllOf(HasSubstr((folder / "shard-1").native()), HasSubstr(kIndex)));
}

TEST(CheckpointTest, BrokenShardNamesShardAndIndex) {
  TempFolder folder;
  folder.Write("shard-1", "no safetensors");
  folder.Write(kIndex, Index({{"a", "shard-1"}}));
  auto checkpoint = Checkpoint::Open(folder.path());
  EXPECT_EQ(checkpoint.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(MessageOf(checkpoint),
              AllOf(HasSubstr((folder / "shard-1").native()), HasSubstr(kIndex)));
}

TEST(CheckpointTest, TensorListedButAbsentNamesTensorAndFile) {
  TempFolder folder;
  WriteShard(folder / "one", {"a"});
  folder.Write(kIndex, Index({{"a", "one"}, {"ghost", "one"}}));
  auto checkpoint = Checkpoint::Open(folder.path());
  EXPECT_EQ(checkpoint.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(MessageOf(checkpoint), AllOf(HasSubstr("\"ghost\""), HasSubstr("1 in all"),
                                           HasSubstr((folder / "one").native()), HasSubstr(kIndex),
                                           HasSubstr("does not hold")));
}

TEST(CheckpointTest, TensorPresentButNotListedNamesTensorAndFile) {
  TempFolder folder;
  WriteShard(folder / "one", {"a", "extra"});
  folder.Write(kIndex, Index({{"a", "one"}}));
  auto checkpoint = Checkpoint::Open(folder.path());
  EXPECT_EQ(checkpoint.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(MessageOf(checkpoint),
              AllOf(HasSubstr("\"extra\""), HasSubstr((folder / "one").native()),
                    HasSubstr("does not list"), Not(HasSubstr("\"a\""))));
}

TEST(CheckpointTest, TensorInASecondShardNamesBothFiles) {
  TempFolder folder;
  WriteShard(folder / "one", {"a"});
  WriteShard(folder / "two", {"a", "b"});
  folder.Write(kIndex, Index({{"a", "one"}, {"b", "two"}}));
  auto checkpoint = Checkpoint::Open(folder.path());
  EXPECT_EQ(checkpoint.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(MessageOf(checkpoint), AllOf(HasSubstr("\"a\""), HasSubstr((folder / "two").native()),
                                           HasSubstr("places it in one")));
}

TEST(CheckpointTest, ManyOffendersAreCountedAndAFewNamed) {
  TempFolder folder;
  WriteShard(folder / "one", {"a"});
  std::vector<std::pair<std::string, std::string>> map = {{"a", "one"}};
  for (int i = 0; i < 1000; ++i) map.push_back({absl::StrCat("ghost", i), "one"});
  folder.Write(kIndex, Index(map));
  auto checkpoint = Checkpoint::Open(folder.path());
  EXPECT_THAT(MessageOf(checkpoint), AllOf(HasSubstr("1000 in all"), HasSubstr("\"ghost0\"")));
  EXPECT_LT(MessageOf(checkpoint).size(), 1000u);
}

struct BadIndex {
  const char* name;
  std::string json;
  std::string message_part;
};

class BadIndexTest : public ::testing::TestWithParam<BadIndex> {};

TEST_P(BadIndexTest, IsRefusedByName) {
  auto map = ParseSafetensorsIndex(GetParam().json, "model.index.json");
  ASSERT_FALSE(map.ok());
  EXPECT_EQ(map.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(map.status().message()),
              AllOf(HasSubstr("model.index.json"), HasSubstr(GetParam().message_part)));

  TempFolder folder;
  folder.Write(kIndex, GetParam().json);
  auto checkpoint = Checkpoint::Open(folder.path());
  EXPECT_EQ(checkpoint.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(MessageOf(checkpoint),
              AllOf(HasSubstr((folder / kIndex).native()), HasSubstr(GetParam().message_part)));
}

std::string OneFile(const std::string& file) {
  return absl::StrCat(R"({"weight_map":{"t.weight":)", file, "}}");
}

INSTANTIATE_TEST_SUITE_P(
    Files, BadIndexTest,
    ::testing::Values(BadIndex{"empty", "", ""}, BadIndex{"broken", "{", ""},
                      BadIndex{"trailing_text", Index({{"a", "b"}}) + "x", ""},
                      BadIndex{"nul_and_more", Index({{"a", "b"}}) + std::string("\0x", 2), ""},
                      BadIndex{"array", "[]", "weight_map"}, BadIndex{"number", "1", "weight_map"},
                      BadIndex{"no_weight_map", R"({"metadata":{}})", "weight_map"},
                      BadIndex{"weight_map_array", R"({"weight_map":[]})", "weight_map"},
                      BadIndex{"weight_map_empty", R"({"weight_map":{}})", "weight_map is empty"},
                      BadIndex{"duplicate_tensor",
                               R"({"weight_map":{"t.weight":"a","t.weight":"a"}})", "t.weight"},
                      BadIndex{"duplicate_map",
                               R"({"weight_map":{"a":"b"},"weight_map":{"a":"b"}})", "weight_map"},
                      BadIndex{"too_deep", R"({"metadata":)" + std::string(100000, '['), ""},
                      BadIndex{"file_number", OneFile("1"), "t.weight"},
                      BadIndex{"file_null", OneFile("null"), "t.weight"},
                      BadIndex{"file_empty", OneFile(R"("")"), "t.weight"},
                      BadIndex{"file_absolute", OneFile(R"("/etc/passwd")"), "t.weight"},
                      BadIndex{"file_parent", OneFile(R"("../vae/model.safetensors")"), "t.weight"},
                      BadIndex{"file_parent_inside", OneFile(R"("sub/../../x")"), "t.weight"},
                      BadIndex{"file_parent_at_end", OneFile(R"("sub/..")"), "t.weight"},
                      BadIndex{"file_parent_only", OneFile(R"("..")"), "t.weight"},
                      BadIndex{"file_dot", OneFile(R"("./x")"), "t.weight"},
                      BadIndex{"file_double_slash", OneFile(R"("sub//x")"), "t.weight"},
                      BadIndex{"file_nul", OneFile(R"("x\u0000y")"), "t.weight"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace dlo
