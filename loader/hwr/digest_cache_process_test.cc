// That processes with one cache of digests share the hashing, whatever becomes of one of them.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "loader/hwr/digest_cache.h"
#include "loader/hwr/source_fingerprint.h"
#include "loader/hwr/store_testing.h"

namespace dlo::hwr {
namespace {

namespace fs = std::filesystem;

constexpr int kFiles = 8;
constexpr int64_t kFileBytes = 300'000;

class DigestCacheProcessTest : public ::testing::Test {
 protected:
  DigestCacheProcessTest() {
    for (int i = 0; i < kFiles; ++i) {
      folder_.Write(absl::StrCat("model/", i), std::string(kFileBytes, static_cast<char>('a' + i)));
      names_.push_back(absl::StrCat(i));
    }
    undisturbed_ = Fingerprint(nullptr).digest();
    // Digests of files that have just changed are not kept.
    const absl::Time written = absl::Now();
    while (absl::Now() - written < absl::Milliseconds(150)) absl::SleepFor(absl::Milliseconds(10));
  }

  fs::path File(int i) const { return folder_ / absl::StrCat("model/", i); }
  DigestCache Cache(absl::Time deadline = absl::InfiniteFuture()) const {
    return DigestCache(folder_ / "digests", {.deadline = deadline});
  }
  SourceFingerprint Fingerprint(const DigestCache* cache) const {
    absl::StatusOr<SourceFingerprint> sources =
        FingerprintSources({{.component = "vae", .folder = folder_ / "model", .names = names_}},
                           {.cache = cache, .threads = 2});
    EXPECT_TRUE(sources.ok()) << sources.status();
    return sources.ok() ? *std::move(sources) : SourceFingerprint();
  }
  // A process that sends what it has hashed, once done.
  std::unique_ptr<Child> Hasher(const Pipe& results, absl::Time deadline = absl::InfiniteFuture(),
                                const Pipe* go = nullptr) const {
    return std::make_unique<Child>([this, &results, deadline, go] {
      if (go != nullptr) go->Receive();
      const DigestCache cache = Cache(deadline);
      const SourceFingerprint sources = Fingerprint(&cache);
      results.Send(absl::StrCat(sources.bytes_hashed()));
      return sources.digest() == undisturbed_ ? 0 : 1;
    });
  }
  static int64_t Bytes(const Pipe& results) {
    int64_t bytes = -1;
    EXPECT_TRUE(absl::SimpleAtoi(results.Receive(), &bytes));
    return bytes;
  }
  // A process that has the claim to a file and does nothing with it.
  std::unique_ptr<Child> Claimer(int file) const {
    Pipe ready;
    auto claimer = std::make_unique<Child>([&] {
      const absl::StatusOr<Descriptor> claim = Cache().Claim(File(file), Soon());
      ready.Send(claim.ok() ? "claimed" : "not");
      while (true) pause();
      return 0;
    });
    EXPECT_EQ(ready.Receive(), "claimed");
    return claimer;
  }
  bool IsKnown(int i) const {
    struct stat info;
    EXPECT_EQ(stat(File(i).c_str(), &info), 0);
    const FileStat stat = {.device = info.st_dev,
                           .inode = info.st_ino,
                           .size = info.st_size,
                           .mtime_ns = info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec,
                           .ctime_ns = info.st_ctim.tv_sec * 1'000'000'000 + info.st_ctim.tv_nsec};
    return Cache().Find(File(i), stat).has_value();
  }
  void WaitUntilKnown(const std::vector<int>& files) const {
    const absl::Time deadline = Soon();
    for (const int i : files) {
      while (!IsKnown(i) && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
      ASSERT_TRUE(IsKnown(i)) << i;
    }
  }

  TempFolder folder_;
  std::vector<std::string> names_;
  std::string undisturbed_;
};

TEST_F(DigestCacheProcessTest, ManyThatBeginAtOnceHashOneCopyTogether) {
  constexpr int kProcesses = 6;
  for (int round = 0; round < 5; ++round) {
    fs::remove_all(folder_ / "digests");
    Pipe go, results;
    std::vector<std::unique_ptr<Child>> hashers;
    for (int i = 0; i < kProcesses; ++i) {
      hashers.push_back(Hasher(results, absl::InfiniteFuture(), &go));
    }
    for (int i = 0; i < kProcesses; ++i) go.Send("");
    int64_t bytes = 0;
    for (int i = 0; i < kProcesses; ++i) bytes += Bytes(results);
    for (const auto& hasher : hashers) EXPECT_EQ(hasher->Wait(), 0);
    EXPECT_EQ(bytes, kFiles * kFileBytes);
  }
}

TEST_F(DigestCacheProcessTest, WhileOthersHashAFileTheRestIsHashed) {
  const auto claimer = Claimer(0);
  Pipe results;
  const auto hasher = Hasher(results);
  WaitUntilKnown({1, 2, 3, 4, 5, 6, 7});
  EXPECT_FALSE(IsKnown(0));
  kill(claimer->pid(), SIGKILL);
  EXPECT_EQ(Bytes(results), kFiles * kFileBytes);
  EXPECT_EQ(hasher->Wait(), 0);
}

TEST_F(DigestCacheProcessTest, OfThoseThatWaitForOneThatIsKilledOneHashes) {
  std::vector<std::unique_ptr<Child>> claimers;
  for (const int file : {2, 5}) claimers.push_back(Claimer(file));
  Pipe results;
  std::vector<std::unique_ptr<Child>> hashers;
  for (int i = 0; i < 3; ++i) hashers.push_back(Hasher(results));
  WaitUntilKnown({0, 1, 3, 4, 6, 7});
  for (const auto& claimer : claimers) kill(claimer->pid(), SIGKILL);
  int64_t bytes = 0;
  for (int i = 0; i < 3; ++i) bytes += Bytes(results);
  for (const auto& hasher : hashers) EXPECT_EQ(hasher->Wait(), 0);
  EXPECT_EQ(bytes, kFiles * kFileBytes);
}

TEST_F(DigestCacheProcessTest, OneThatIsStoppedIsWaitedForUntilTheDeadline) {
  const auto claimer = Claimer(3);
  kill(claimer->pid(), SIGSTOP);
  const absl::Time start = absl::Now();
  Pipe results;
  const auto hasher = Hasher(results, start + absl::Milliseconds(300));
  EXPECT_EQ(Bytes(results), kFiles * kFileBytes);
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(300));
  EXPECT_EQ(hasher->Wait(), 0);
  EXPECT_TRUE(IsKnown(3)) << "its claim does not keep others from keeping what they found";
}

TEST_F(DigestCacheProcessTest, FilesWhoseDigestsCannotBeKeptAreHashedByEachAndLeaveNothing) {
  // Never old enough.
  for (int i = 0; i < kFiles; ++i) {
    const timespec later[2] = {{.tv_sec = 1L << 33}, {.tv_sec = 1L << 33}};
    ASSERT_EQ(utimensat(AT_FDCWD, File(i).c_str(), later, 0), 0);
  }
  constexpr int kProcesses = 4;
  Pipe go, results;
  std::vector<std::unique_ptr<Child>> hashers;
  for (int i = 0; i < kProcesses; ++i) {
    hashers.push_back(Hasher(results, absl::InfiniteFuture(), &go));
  }
  for (int i = 0; i < kProcesses; ++i) go.Send("");
  for (int i = 0; i < kProcesses; ++i) EXPECT_EQ(Bytes(results), kFiles * kFileBytes);
  for (const auto& hasher : hashers) EXPECT_EQ(hasher->Wait(), 0);
  EXPECT_TRUE(fs::is_empty(folder_ / "digests"));
}

TEST_F(DigestCacheProcessTest, AReadOnlyCacheIsReadAndNeverWritten) {
  const DigestCache read_only(folder_ / "digests", {.read_only = true});
  EXPECT_EQ(Fingerprint(&read_only).bytes_hashed(), kFiles * kFileBytes);
  EXPECT_FALSE(fs::exists(folder_ / "digests"));
  const DigestCache cache = Cache();
  Fingerprint(&cache);
  EXPECT_EQ(Fingerprint(&read_only).bytes_hashed(), 0);
  // One that is not known any more.
  fs::permissions(File(4), fs::perms::owner_read);
  const auto before = Snapshot(folder_ / "digests");
  EXPECT_EQ(Fingerprint(&read_only).bytes_hashed(), kFileBytes);
  EXPECT_EQ(Snapshot(folder_ / "digests"), before);
}

}  // namespace
}  // namespace dlo::hwr
