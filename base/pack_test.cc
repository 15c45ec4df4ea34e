// Mapped files under change, the guard against SIGBUS, and packing.
#include "base/pack.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/sigbus_guard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dlo {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kMiB = 1 << 20;

class MappedFileTest : public testing::Test {
 protected:
  MappedFileTest() {
    std::string pattern = (std::filesystem::temp_directory_path() / "dlo-map-XXXXXX").native();
    folder_ = mkdtemp(pattern.data());
  }
  ~MappedFileTest() override {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  std::string Write(const std::string& name, const std::string& content) {
    const std::string path = (folder_ / name).native();
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }
  MappedFile Map(const std::string& path) {
    absl::StatusOr<MappedFile> file = MappedFile::Open(path);
    EXPECT_TRUE(file.ok()) << file.status();
    return *std::move(file);
  }
  // Bytes that differ from page to page.
  static std::string Pattern(int64_t bytes) {
    std::string text(static_cast<size_t>(bytes), '\0');
    for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 31 + i / 4096);
    return text;
  }

  std::filesystem::path folder_;
};

std::string Text(absl::Span<const std::byte> bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

TEST_F(MappedFileTest, GivesTheFilesBytes) {
  const std::string content = Pattern(10'000);
  const MappedFile file = Map(Write("a", content));
  EXPECT_EQ(Text(file.bytes()), content);
  std::string copy(5000, '\0');
  EXPECT_TRUE(
      file.Read(reinterpret_cast<std::byte*>(copy.data()), file.bytes().data() + 4000, 5000, "x")
          .ok());
  EXPECT_EQ(copy, content.substr(4000, 5000));
}

TEST_F(MappedFileTest, MovingKeepsTheBytesWhereTheyAre) {
  MappedFile file = Map(Write("a", "content"));
  const std::byte* const data = file.bytes().data();
  const MappedFile other = std::move(file);
  EXPECT_EQ(other.bytes().data(), data);
  EXPECT_EQ(Text(other.bytes()), "content");
  EXPECT_TRUE(other.CheckUnchanged().ok());
}

TEST_F(MappedFileTest, RefusesWhatIsNoFileWithContent) {
  EXPECT_EQ(MappedFile::Open(folder_ / "absent").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(MappedFile::Open(folder_).status().message(), HasSubstr("folder"));
  EXPECT_THAT(MappedFile::Open(Write("empty", "")).status().message(), HasSubstr("empty"));
}

// Everything that can happen to a file while it is mapped, and what is said of it.
TEST_F(MappedFileTest, NoticesEveryChange) {
  struct Case {
    const char* name;
    std::function<void(const std::string& path)> change;
    const char* said;
  };
  const std::vector<Case> cases = {
      {"truncated", [](const std::string& p) { EXPECT_EQ(truncate(p.c_str(), 5000), 0); },
       "truncated from 10000 to 5000 bytes"},
      {"grown", [](const std::string& p) { std::ofstream(p, std::ios::app) << "more"; },
       "grew from 10000 to 10004 bytes"},
      {"written",
       [](const std::string& p) {
         std::fstream out(p, std::ios::in | std::ios::out);
         out.seekp(17);
         out << "X";
       },
       "was written to"},
      {"replaced",
       [this](const std::string& p) {
         std::filesystem::rename(Write("new", std::string(10'000, 'n')), p);
       },
       "replaced by another file"},
      {"removed", [](const std::string& p) { std::filesystem::remove(p); },
       "cannot be found any more"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const std::string path = Write(c.name, std::string(10'000, 'o'));
    // Into the past: a file system's clock may not have moved on between two quick writes.
    const std::array<timespec, 2> past = {{{.tv_sec = 1000, .tv_nsec = 0}, {.tv_sec = 1000}}};
    ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), past.data(), 0), 0);
    const MappedFile file = Map(path);
    ASSERT_TRUE(file.CheckUnchanged().ok());
    c.change(path);
    const absl::Status status = file.CheckUnchanged();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(path), HasSubstr(c.said)));
    std::array<std::byte, 16> copy;
    EXPECT_THAT(std::string(file.Read(copy.data(), file.bytes().data(), 16, "rows of x").message()),
                AllOf(HasSubstr("rows of x"), HasSubstr(c.said)));
  }
}

TEST_F(MappedFileTest, ReadingTouchesNeitherIdentityNorCheck) {
  const MappedFile file = Map(Write("a", Pattern(100'000)));
  std::string copy(100'000, '\0');
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(
        file.Read(reinterpret_cast<std::byte*>(copy.data()), file.bytes().data(), 100'000, "x")
            .ok());
  }
}

TEST_F(MappedFileTest, ACopyFromAFileThatWasCutEndsInsteadOfTheProcess) {
  const std::string content = Pattern(8 * kMiB);
  const std::string path = Write("a", content);
  const MappedFile file = Map(path);
  std::vector<std::byte> copy(8 * kMiB);
  ASSERT_TRUE(GuardedCopy(copy.data(), file.bytes().data(), 8 * kMiB));
  ASSERT_EQ(truncate(path.c_str(), 3 * kMiB), 0);
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(GuardedCopy(copy.data(), file.bytes().data(), 8 * kMiB));
    EXPECT_FALSE(GuardedCopy(copy.data(), file.bytes().data() + 3 * kMiB, 1));
    // What is left can still be read.
    EXPECT_TRUE(GuardedCopy(copy.data(), file.bytes().data(), 3 * kMiB));
    EXPECT_EQ(std::memcmp(copy.data(), content.data(), 3 * kMiB), 0);
  }
}

TEST_F(MappedFileTest, ThreadsAreGuardedApart) {
  const std::string whole_path = Write("whole", Pattern(kMiB)),
                    cut_path = Write("cut", Pattern(kMiB));
  const MappedFile whole = Map(whole_path), cut = Map(cut_path);
  ASSERT_EQ(truncate(cut_path.c_str(), 4096), 0);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<std::byte> copy(kMiB);
      const MappedFile& file = t % 2 == 0 ? whole : cut;
      for (int i = 0; i < 200; ++i) {
        if (GuardedCopy(copy.data(), file.bytes().data(), kMiB) != (t % 2 == 0)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

using SigbusDeathTest = MappedFileTest;

// By the signal or, where a sanitizer reports it, with a code that is none of the test's own.
bool EndedBySigbus(int status) {
  if (WIFSIGNALED(status)) return WTERMSIG(status) == SIGBUS;
#if defined(DLO_SANITIZED)
  return WEXITSTATUS(status) == 1 || WEXITSTATUS(status) > 5;
#else
  return false;
#endif
}

TEST_F(SigbusDeathTest, OutsideAGuardedCopyTheSignalStillEndsTheProcess) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const std::string path = Write("a", Pattern(kMiB));
  EXPECT_EXIT(
      {
        const MappedFile file = Map(path);
        if (truncate(path.c_str(), 4096) != 0) _exit(3);
        std::byte copy;
        // A failed copy before must not leave a guard behind.
        if (GuardedCopy(&copy, file.bytes().data() + 8192, 1)) _exit(4);
        const volatile std::byte* gone = file.bytes().data() + 8192;
        copy = *gone;
        _exit(5);
      },
      EndedBySigbus, "");
}

TEST_F(SigbusDeathTest, AHandlerThatWasThereBeforeGetsWhatIsNotOurs) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const std::string path = Write("a", Pattern(kMiB));
  EXPECT_EXIT(
      {
        signal(SIGBUS, [](int) { _exit(42); });
        const MappedFile file = Map(path);
        if (truncate(path.c_str(), 4096) != 0) _exit(3);
        std::byte copy;
        if (GuardedCopy(&copy, file.bytes().data() + 8192, 1)) _exit(4);
        const volatile std::byte* gone = file.bytes().data() + 8192;
        copy = *gone;
        _exit(5);
      },
      testing::ExitedWithCode(42), "");
}

// Two files and memory of our own, with a gap between the pieces.
class PackPiecesTest : public MappedFileTest {
 protected:
  PackPiecesTest()
      : path_(Write("one", Pattern(2 * kMiB))),
        one_(Map(path_)),
        two_(Map(Write("two", Pattern(4096)))) {
    pieces_ = {
        {.source = one_.bytes().data() + 100,
         .offset = 0,
         .bytes = 1000,
         .file = &one_,
         .tensor = "blocks.0.a"},
        {.source = reinterpret_cast<const std::byte*>(own_.data()), .offset = 1024, .bytes = 300},
        {.source = two_.bytes().data(),
         .offset = 1536,
         .bytes = 4096,
         .file = &two_,
         .tensor = "blocks.0.b"},
        {.source = one_.bytes().data() + kMiB,
         .offset = 5632,
         .bytes = 5000,
         .file = &one_,
         .tensor = "blocks.0.c"}};
  }
  static constexpr int64_t kTotal = 5632 + 5000;

  const std::string own_ = std::string(300, 'p');
  const std::string path_;
  const MappedFile one_, two_;
  std::vector<PackPiece> pieces_;
};

TEST_F(PackPiecesTest, PutsEachPieceInItsPlaceAndLeavesTheGaps) {
  std::vector<std::byte> block(kTotal, std::byte{0xEE});
  ASSERT_TRUE(PackPieces(block.data(), pieces_).ok());
  const std::string text = Text(block);
  EXPECT_EQ(text.substr(0, 1000), Text(one_.bytes()).substr(100, 1000));
  EXPECT_EQ(text.substr(1000, 24), std::string(24, '\xEE'));
  EXPECT_EQ(text.substr(1024, 300), own_);
  EXPECT_EQ(text.substr(1536, 4096), Text(two_.bytes()));
  EXPECT_EQ(text.substr(5632), Text(one_.bytes()).substr(kMiB, 5000));
}

TEST_F(PackPiecesTest, NamesTensorAndFileOfALostPage) {
  ASSERT_EQ(truncate(path_.c_str(), kMiB), 0);
  std::vector<std::byte> block(kTotal);
  const absl::Status status = PackPieces(block.data(), pieces_);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("tensor \"blocks.0.c\""), HasSubstr(path_),
                    HasSubstr("truncated from 2097152 to 1048576 bytes")));
}

// All pages are there, but they are not those of the model that was loaded.
TEST_F(PackPiecesTest, AFileThatWasWrittenToIsNotPacked) {
  std::fstream(path_, std::ios::in | std::ios::out) << "overwritten";
  std::vector<std::byte> block(kTotal);
  const absl::Status status = PackPieces(block.data(), pieces_);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("tensor \"blocks.0.a\""), HasSubstr("was written to")));
}

TEST_F(PackPiecesTest, ShardsOfTheClippedPiecesMakeTheBlock) {
  std::vector<std::byte> block(kTotal, std::byte{0});
  ASSERT_TRUE(PackPieces(block.data(), pieces_).ok());
  for (int64_t shard_bytes : {int64_t{256}, int64_t{1000}, int64_t{4096}, kTotal, 2 * kTotal}) {
    std::vector<std::byte> joined;
    for (int64_t begin = 0; begin < kTotal; begin += shard_bytes) {
      std::vector<std::byte> shard(shard_bytes, std::byte{0});
      ASSERT_TRUE(PackPieces(shard.data(), ClipPieces(pieces_, begin, begin + shard_bytes)).ok());
      joined.insert(joined.end(), shard.begin(), shard.end());
    }
    joined.resize(kTotal);
    EXPECT_EQ(joined, block) << shard_bytes;
  }
  EXPECT_TRUE(ClipPieces(pieces_, 1000, 1024).empty());
}

}  // namespace
}  // namespace dlo
