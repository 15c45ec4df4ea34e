#include "loader/hwr/source_fingerprint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/sha256.h"
#include "loader/test_folder.h"

namespace dlo::hwr {
namespace {

namespace fs = std::filesystem;

SourceFingerprint Fingerprint(const fs::path& folder, std::vector<std::string> names,
                              const FingerprintOptions& options = {}) {
  absl::StatusOr<SourceFingerprint> sources = FingerprintSources(
      {{.component = "transformer", .folder = folder, .names = std::move(names)}}, options);
  EXPECT_TRUE(sources.ok()) << sources.status();
  return sources.ok() ? *std::move(sources) : SourceFingerprint();
}

// A hub cache with one repository, whose only file's blob has a name that its content does not
// have: whoever trusts the name can be told from who hashes.
class HubCache {
 public:
  static constexpr char kCommit[] = "0123456789abcdef0123456789abcdef01234567";
  const std::string blob = std::string(64, 'b');

  HubCache() {
    folder_.Write("models--org--name/blobs/" + blob, "content");
    fs::create_directories(snapshot());
    fs::create_symlink("../../blobs/" + blob, snapshot() / "a.safetensors");
  }
  fs::path repository() const { return folder_.path() / "models--org--name"; }
  fs::path snapshot() const { return repository() / "snapshots" / kCommit; }
  const TempFolder& folder() const { return folder_; }

 private:
  TempFolder folder_;
};

bool Trusted(const fs::path& folder, bool from_hub) {
  return Fingerprint(folder, {"a.safetensors"}, {.from_hub = from_hub}).bytes_hashed() == 0;
}

TEST(SourceFingerprintTest, DependsOnContentNamesAndComponentsAlone) {
  TempFolder folder;
  folder.Write("one/a.safetensors", "aaaa");
  folder.Write("one/b.safetensors", "bbbb");
  folder.Write("two/a.safetensors", "aaaa");
  folder.Write("two/b.safetensors", "bbbb");
  folder.Write("other/a.safetensors", "aaaa");
  folder.Write("other/b.safetensors", "bbbc");
  folder.Write("renamed/a.safetensors", "aaaa");
  folder.Write("renamed/c.safetensors", "bbbb");
  const std::string digest =
      Fingerprint(folder / "one", {"a.safetensors", "b.safetensors"}).digest();
  EXPECT_EQ(Fingerprint(folder / "two", {"b.safetensors", "a.safetensors"}).digest(), digest);
  EXPECT_NE(Fingerprint(folder / "other", {"a.safetensors", "b.safetensors"}).digest(), digest);
  EXPECT_NE(Fingerprint(folder / "renamed", {"a.safetensors", "c.safetensors"}).digest(), digest);
  EXPECT_NE(Fingerprint(folder / "one", {"a.safetensors"}).digest(), digest);
  EXPECT_NE(FingerprintSources({{.component = "vae",
                                 .folder = folder / "one",
                                 .names = {"a.safetensors", "b.safetensors"}}})
                ->digest(),
            digest);
}

TEST(SourceFingerprintTest, SymlinkedAndRelativeSpellingsOfAFolderGiveTheSameDigest) {
  TempFolder folder;
  folder.Write("model/a.safetensors", "aaaa");
  fs::create_directory_symlink(folder / "model", folder / "link");
  const std::string digest = Fingerprint(folder / "model", {"a.safetensors"}).digest();
  EXPECT_EQ(Fingerprint(folder / "link", {"a.safetensors"}).digest(), digest);
  EXPECT_EQ(Fingerprint(folder / "link/../model/.", {"a.safetensors"}).digest(), digest);
  EXPECT_EQ(Fingerprint(fs::relative(folder / "model"), {"a.safetensors"}).digest(), digest);
}

TEST(SourceFingerprintTest, ABlobOfAHubSnapshotIsTrustedUnderItsName) {
  const HubCache cache;
  EXPECT_TRUE(Trusted(cache.snapshot(), /*from_hub=*/true));
  EXPECT_FALSE(Trusted(cache.snapshot(), /*from_hub=*/false)) << "a folder was named, not an id";
}

TEST(SourceFingerprintTest, TheSameContentHasTheSameDigestFromTheHubAndFromAFolder) {
  TempFolder folder;
  const std::string name = Sha256Of("content");
  folder.Write("models--org--name/blobs/" + name, "content");
  const fs::path snapshot = folder / ("models--org--name/snapshots/" + std::string(40, '1'));
  fs::create_directories(snapshot);
  fs::create_symlink("../../blobs/" + name, snapshot / "a.safetensors");
  folder.Write("copy/a.safetensors", "content");
  const SourceFingerprint hub = Fingerprint(snapshot, {"a.safetensors"}, {.from_hub = true});
  EXPECT_EQ(hub.bytes_hashed(), 0);
  EXPECT_EQ(hub.digest(), Fingerprint(folder / "copy", {"a.safetensors"}).digest());
}

TEST(SourceFingerprintTest, WhatOnlyLooksLikeABlobIsHashed) {
  {
    // A link to a file of a hexadecimal name, outside any hub cache.
    TempFolder folder;
    folder.Write("blobs/" + std::string(64, 'b'), "content");
    fs::create_directories(folder / "snapshots");
    fs::create_symlink("../blobs/" + std::string(64, 'b'), folder / "snapshots/a.safetensors");
    EXPECT_FALSE(Trusted(folder / "snapshots", true));
  }
  {
    // The blob of another repository.
    HubCache cache;
    cache.folder().Write("models--org--other/blobs/" + cache.blob, "content");
    fs::remove(cache.snapshot() / "a.safetensors");
    fs::create_symlink(cache.folder() / ("models--org--other/blobs/" + cache.blob),
                       cache.snapshot() / "a.safetensors");
    EXPECT_FALSE(Trusted(cache.snapshot(), true));
  }
  {
    // A blob below a folder of the blobs.
    HubCache cache;
    cache.folder().Write("models--org--name/blobs/more/" + cache.blob, "content");
    fs::remove(cache.snapshot() / "a.safetensors");
    fs::create_symlink("../../blobs/more/" + cache.blob, cache.snapshot() / "a.safetensors");
    EXPECT_FALSE(Trusted(cache.snapshot(), true));
  }
  {
    // A file that is no link.
    HubCache cache;
    fs::remove(cache.snapshot() / "a.safetensors");
    std::ofstream(cache.snapshot() / "a.safetensors") << "content";
    EXPECT_FALSE(Trusted(cache.snapshot(), true));
  }
  {
    // A snapshot that is no commit.
    HubCache cache;
    fs::rename(cache.snapshot(), cache.repository() / "snapshots/main");
    EXPECT_FALSE(Trusted(cache.repository() / "snapshots/main", true));
  }
  {
    // git's name of a small file is no digest of its content alone.
    HubCache cache;
    const std::string name(40, 'c');
    cache.folder().Write("models--org--name/blobs/" + name, "content");
    fs::remove(cache.snapshot() / "a.safetensors");
    fs::create_symlink("../../blobs/" + name, cache.snapshot() / "a.safetensors");
    EXPECT_FALSE(Trusted(cache.snapshot(), true));
  }
}

TEST(SourceFingerprintTest, TheGuardNoticesEveryKindOfChange) {
  TempFolder folder;
  const auto fresh = [&] {
    fs::remove_all(folder / "model");
    folder.Write("model/real", "aaaa");
    folder.Write("model/twin", "aaaa");
    fs::create_symlink("real", folder / "model/a.safetensors");
    return Fingerprint(folder / "model", {"a.safetensors"});
  };
  const fs::path real = folder / "model/real";
  EXPECT_TRUE(fresh().CheckUnchanged().ok());

  SourceFingerprint sources = fresh();
  std::ofstream(real, std::ios::app) << "b";
  EXPECT_EQ(sources.CheckUnchanged().code(), absl::StatusCode::kFailedPrecondition);

  sources = fresh();
  fs::remove(real);
  EXPECT_FALSE(sources.CheckUnchanged().ok());

  sources = fresh();
  fs::rename(folder / "model/twin", real);  // another inode, same content
  EXPECT_FALSE(sources.CheckUnchanged().ok());

  sources = fresh();
  chmod(real.c_str(), 0600);  // only the time of change
  EXPECT_FALSE(sources.CheckUnchanged().ok());

  sources = fresh();
  fs::create_hard_link(real, folder / "model/again");
  fs::remove(folder / "model/a.safetensors");
  fs::create_symlink("again", folder / "model/a.safetensors");  // same inode, another link
  EXPECT_FALSE(sources.CheckUnchanged().ok());
}

TEST(SourceFingerprintTest, RefusesWhatIsNoFileOfTheFolder) {
  TempFolder folder;
  folder.Write("a.safetensors", "aaaa");
  fs::create_directories(folder / "model/sub.safetensors");
  mkfifo((folder / "model/fifo.safetensors").c_str(), 0600);
  const auto code = [&](const std::string& name) {
    return FingerprintSources(
               {{.component = "transformer", .folder = folder / "model", .names = {name}}})
        .status()
        .code();
  };
  EXPECT_EQ(code("missing.safetensors"), absl::StatusCode::kNotFound);
  EXPECT_EQ(code("sub.safetensors"), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code("fifo.safetensors"), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code("../a.safetensors"), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code((folder / "a.safetensors").native()), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(""), absl::StatusCode::kInvalidArgument);
}

class DigestCacheTest : public ::testing::Test {
 protected:
  DigestCacheTest() : cache_(folder_ / "digests") { folder_.Write("model/a.safetensors", "aaaa"); }

  // Hashes until the file is old enough for its digest to be kept.
  bool Fill() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (std::chrono::steady_clock::now() < deadline) {
      if (Hashed() == 0) return true;
    }
    return false;
  }
  int64_t Hashed() {
    const SourceFingerprint sources =
        Fingerprint(folder_ / "model", {"a.safetensors"}, {.cache = &cache_});
    digest_ = sources.digest();
    return sources.bytes_hashed();
  }
  fs::path Entry() const { return fs::directory_iterator(cache_.folder())->path(); }

  TempFolder folder_;
  DigestCache cache_;
  std::string digest_;
};

TEST_F(DigestCacheTest, AKnownDigestSparesHashingAndIsTheSame) {
  ASSERT_EQ(Hashed(), 4);
  const std::string first = digest_;
  ASSERT_TRUE(Fill());
  EXPECT_EQ(digest_, first);
  EXPECT_EQ(fs::status(cache_.folder()).permissions(), fs::perms::owner_all);
  EXPECT_EQ(fs::status(Entry()).permissions(), fs::perms::owner_read | fs::perms::owner_write);
}

TEST_F(DigestCacheTest, AChangedFileIsHashedAgain) {
  ASSERT_TRUE(Fill());
  const std::string first = digest_;
  folder_.Write("model/a.safetensors", "aaab");
  EXPECT_EQ(Hashed(), 4);
  EXPECT_NE(digest_, first);
}

TEST_F(DigestCacheTest, ADamagedOrForeignEntryIsNotBelieved) {
  ASSERT_TRUE(Fill());
  const fs::path entry = Entry();
  std::string text;
  std::getline(std::ifstream(entry), text, '\0');
  std::string changed = text;
  const size_t at = changed.find("\"content\":\"") + 11;
  changed[at] = changed[at] == '0' ? '1' : '0';
  for (const std::string& damaged :
       {changed, text.substr(0, text.size() / 2), std::string("{}"), std::string(),
        std::string("[]"), text + " ", std::string(10000, '{')}) {
    std::ofstream(entry, std::ios::trunc) << damaged;
    EXPECT_EQ(Hashed(), 4) << damaged;
    std::ofstream(entry, std::ios::trunc) << damaged;  // it may have been put right meanwhile
  }
  std::ofstream(entry, std::ios::trunc) << text;
  EXPECT_EQ(Hashed(), 0);
  chmod(entry.c_str(), 0666);
  EXPECT_EQ(Hashed(), 4) << "anybody could have written it";
  fs::remove(entry);
  std::ofstream(folder_ / "elsewhere") << text;
  chmod((folder_ / "elsewhere").c_str(), 0600);
  fs::create_symlink(folder_ / "elsewhere", entry);
  EXPECT_EQ(Hashed(), 4) << "a link";
}

TEST_F(DigestCacheTest, ACacheThatCannotBeWrittenIsNoFailure) {
  folder_.Write("digests", "a file where the folder should be");
  EXPECT_EQ(Hashed(), 4);
  EXPECT_EQ(Hashed(), 4);
}

}  // namespace
}  // namespace dlo::hwr
