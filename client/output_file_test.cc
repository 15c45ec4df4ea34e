#include "client/output_file.h"

#include <sys/stat.h>

#include <fstream>
#include <string>
#include <utility>

#include "client/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dlo {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string Hash(const std::string& bytes) {
  Sha256 hash;
  hash.Update(bytes);
  return hash.Finish();
}

TEST(Sha256Test, PublishedValues) {
  EXPECT_EQ(Hash(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Hash("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(FormatOfPathTest, FollowsTheEndingInAnyCase) {
  EXPECT_EQ(*FormatOfPath("a.mp4"), VideoFormat::kMp4);
  EXPECT_EQ(*FormatOfPath("some.folder/a.b.PNG"), VideoFormat::kPngSheet);
  EXPECT_EQ(*FormatOfPath("a.safetensors"), VideoFormat::kSafetensors);
}

TEST(FormatOfPathTest, OtherEndingsAreToldWhichThereAre) {
  for (const char* path : {"a.gif", "a", "mp4", ".mp4", "a.mp4/b", "", "a."}) {
    const absl::Status status = FormatOfPath(path).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << path;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(path), HasSubstr(".mp4"),
                                                     HasSubstr(".png"), HasSubstr(".safetensors")));
  }
}

TEST(OutputFileTest, AppearsOnCommitAndReplaces) {
  TestFolder folder;
  std::ofstream(folder / "a.mp4") << "old";
  absl::StatusOr<OutputFile> file = OutputFile::Create(folder / "a.mp4");
  ASSERT_TRUE(file.ok()) << file.status();
  OutputFile moved = *std::move(file);
  ASSERT_TRUE(moved.Write("one ").ok());
  ASSERT_TRUE(moved.Write("two").ok());
  EXPECT_EQ(moved.size_bytes(), 7);
  EXPECT_EQ(TestFolder::Read(folder / "a.mp4"), "old");
  ASSERT_TRUE(moved.Commit(Hash("one two")).ok());
  EXPECT_EQ(TestFolder::Read(folder / "a.mp4"), "one two");
  EXPECT_THAT(folder.names(), ElementsAre("a.mp4"));
}

TEST(OutputFileTest, AWrongHashLeavesTheOldFile) {
  TestFolder folder;
  std::ofstream(folder / "a.mp4") << "old";
  {
    absl::StatusOr<OutputFile> file = OutputFile::Create(folder / "a.mp4");
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE(file->Write("new").ok());
    EXPECT_EQ(file->Commit(Hash("other")).code(), absl::StatusCode::kDataLoss);
  }
  EXPECT_EQ(TestFolder::Read(folder / "a.mp4"), "old");
  EXPECT_THAT(folder.names(), ElementsAre("a.mp4"));
}

TEST(OutputFileTest, AbandonedItLeavesNothing) {
  TestFolder folder;
  {
    absl::StatusOr<OutputFile> file = OutputFile::Create(folder / "a.mp4");
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE(file->Write("new").ok());
    EXPECT_EQ(folder.names().size(), 1);
  }
  EXPECT_THAT(folder.names(), IsEmpty());
}

TEST(OutputFileTest, HasTheModeThatOpenWouldGive) {
  TestFolder folder;
  const mode_t mask = umask(027);
  absl::StatusOr<OutputFile> file = OutputFile::Create(folder / "a.mp4");
  umask(mask);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(file->Commit(Hash("")).ok());
  struct stat info{};
  ASSERT_EQ(stat((folder / "a.mp4").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640);
}

TEST(OutputFileTest, FoldersThatCannotTakeItAreNamed) {
  TestFolder folder;
  const absl::Status missing = OutputFile::Create(folder / "no/a.mp4").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("no/a.mp4"));
  std::filesystem::create_directory(folder / "d.mp4");
  EXPECT_EQ(OutputFile::Create(folder / "d.mp4").status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dlo
