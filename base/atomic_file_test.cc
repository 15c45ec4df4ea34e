#include "base/atomic_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <set>

namespace dlo {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class AtomicFileTest : public testing::Test {
 protected:
  AtomicFileTest() {
    std::string pattern = testing::TempDir() + "/atomic-XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~AtomicFileTest() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path At(const std::string& name) const { return folder_ / name; }
  AtomicFile Create() const { return *AtomicFile::Create(At("a"), At("a.part"), 0600); }
  absl::StatusOr<AtomicFile> Resume() const {
    return AtomicFile::Resume(At("a"), At("a.part"), 0600);
  }
  std::string Read(const std::string& name) const {
    std::ifstream file(At(name), std::ios::binary);
    return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  }
  std::set<std::string> names() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      names.insert(entry.path().filename().string());
    }
    return names;
  }

  std::filesystem::path folder_;
};

TEST(Sha256Test, PublishedValues) {
  EXPECT_EQ(Sha256Of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256Of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST_F(AtomicFileTest, AppearsOnCommitAndReplaces) {
  std::ofstream(At("a")) << "old";
  AtomicFile file = Create();
  AtomicFile moved = std::move(file);
  ASSERT_TRUE(moved.Write("one ").ok());
  ASSERT_TRUE(moved.Write("two").ok());
  EXPECT_EQ(moved.size_bytes(), 7);
  EXPECT_EQ(Read("a"), "old");
  EXPECT_EQ(moved.Sha256Hex(), Sha256Of("one two"));
  EXPECT_EQ(moved.Commit(), absl::OkStatus());
  EXPECT_EQ(Read("a"), "one two");
  EXPECT_THAT(names(), ElementsAre("a"));
}

TEST_F(AtomicFileTest, AbandonedItLeavesNothing) {
  {
    AtomicFile file = Create();
    ASSERT_TRUE(file.Write("new").ok());
    EXPECT_THAT(names(), ElementsAre("a.part"));
  }
  EXPECT_THAT(names(), IsEmpty());
}

TEST_F(AtomicFileTest, UniqueNamesDoNotMeet) {
  const auto first = AtomicFile::Create(At("a"), At("a.XXXXXX"), 0640);
  const auto second = AtomicFile::Create(At("a"), At("a.XXXXXX"), 0640);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE(first->temporary(), second->temporary());
  struct stat info{};
  ASSERT_EQ(stat(first->temporary().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640);
}

TEST_F(AtomicFileTest, WhatWasKeptIsResumedWithItsHash) {
  {
    absl::StatusOr<AtomicFile> file = Resume();
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(file->size_bytes(), 0);
    ASSERT_TRUE(file->Write("one ").ok());
    file->Keep();
  }
  EXPECT_THAT(names(), ElementsAre("a.part"));
  absl::StatusOr<AtomicFile> file = Resume();
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->size_bytes(), 4);
  ASSERT_TRUE(file->Write("two").ok());
  EXPECT_EQ(file->Sha256Hex(), Sha256Of("one two"));
  EXPECT_EQ(file->Commit(), absl::OkStatus());
  EXPECT_EQ(Read("a"), "one two");
  EXPECT_THAT(names(), ElementsAre("a"));
}

TEST_F(AtomicFileTest, CreateAndTruncateStartAnew) {
  std::ofstream(At("a.part")) << "left behind";
  {
    AtomicFile file = Create();
    EXPECT_EQ(file.size_bytes(), 0);
    EXPECT_EQ(file.Sha256Hex(), Sha256Of(""));
  }
  std::ofstream(At("a.part")) << "left behind";
  absl::StatusOr<AtomicFile> file = Resume();
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->Truncate(), absl::OkStatus());
  ASSERT_TRUE(file->Write("new").ok());
  EXPECT_EQ(file->Sha256Hex(), Sha256Of("new"));
  EXPECT_EQ(file->Commit(), absl::OkStatus());
  EXPECT_EQ(Read("a"), "new");
}

TEST_F(AtomicFileTest, OneAtATimeResumes) {
  absl::StatusOr<AtomicFile> first = Resume();
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(first->Write("x").ok());
  const absl::Status second = Resume().status();
  EXPECT_TRUE(absl::IsUnavailable(second)) << second;
  EXPECT_THAT(second.message(), HasSubstr("another process is writing"));
  EXPECT_EQ(first->Commit(), absl::OkStatus());
  EXPECT_TRUE(Resume().ok());
}

TEST_F(AtomicFileTest, ErrorsNameThePathAndTheReason) {
  const absl::Status missing = AtomicFile::Create(At("no/a"), At("no/a.part"), 0600).status();
  EXPECT_TRUE(absl::IsNotFound(missing));
  EXPECT_THAT(missing.message(), HasSubstr("no/a: cannot be created"));

  // A file may not grow beyond the limit.
  signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  getrlimit(RLIMIT_FSIZE, &old);
  const rlimit small = {.rlim_cur = 10, .rlim_max = old.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  AtomicFile file = Create();
  const absl::Status full = file.Write("more than ten bytes");
  setrlimit(RLIMIT_FSIZE, &old);
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_EQ(file.size_bytes(), 10);
  EXPECT_EQ(file.Sha256Hex(), Sha256Of("more than "));
}

}  // namespace
}  // namespace dlo
