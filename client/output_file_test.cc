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
  ASSERT_TRUE(moved.Commit(Sha256Of("one two")).ok());
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
    EXPECT_EQ(file->Commit(Sha256Of("other")).code(), absl::StatusCode::kDataLoss);
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

TEST(OutputFileTest, ResumesWhatWasKeptOfTheSameContentAndOfNoOther) {
  TestFolder folder;
  const std::string hash = Sha256Of("one two"), other = Sha256Of("other");
  {
    absl::StatusOr<OutputFile> file = OutputFile::Resume(folder / "a.mp4", hash, 7);
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE(file->Write("one ").ok());
    file->Keep();
  }
  EXPECT_EQ(folder.names().size(), 1u);
  EXPECT_EQ(OutputFile::Resume(folder / "a.mp4", other, 7)->size_bytes(), 0);
  EXPECT_EQ(OutputFile::Resume(folder / "b.mp4", hash, 7)->size_bytes(), 0);
  absl::StatusOr<OutputFile> file = OutputFile::Resume(folder / "a.mp4", hash, 7);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->size_bytes(), 4);
  ASSERT_TRUE(file->Write("two").ok());
  ASSERT_TRUE(file->Commit(hash).ok());
  EXPECT_EQ(TestFolder::Read(folder / "a.mp4"), "one two");
  EXPECT_THAT(folder.names(), ElementsAre("a.mp4"));
}

TEST(OutputFileTest, MoreThanThereIsToReceiveIsDropped) {
  TestFolder folder;
  {
    absl::StatusOr<OutputFile> file = OutputFile::Resume(folder / "a.mp4", "ab/../cd", 9);
    ASSERT_TRUE(file->Write("123456789").ok());
    EXPECT_EQ(file->temporary(), folder / ".a.mp4.abcd.partial");
    file->Keep();
  }
  EXPECT_EQ(OutputFile::Resume(folder / "a.mp4", "ab/../cd", 8)->size_bytes(), 0);
}

TEST(OutputFileTest, HasTheModeThatOpenWouldGive) {
  TestFolder folder;
  const mode_t mask = umask(027);
  absl::StatusOr<OutputFile> file = OutputFile::Create(folder / "a.mp4");
  umask(mask);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(file->Commit(Sha256Of("")).ok());
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
