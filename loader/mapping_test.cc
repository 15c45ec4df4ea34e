// What is read from a checkpoint's mapping for as long as it lives: tables, and pages that are
// faulted in.
#include <sys/mman.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/fault_in.h"
#include "loader/host_table.h"
#include "loader/test_folder.h"
#include "loader/weights.h"

namespace dlo {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class HostTableTest : public testing::Test {
 protected:
  static constexpr int64_t kRows = 4000, kColumns = 48;

  HostTableTest() {
    std::vector<float> values(kRows * kColumns);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>(static_cast<int>(i * 7919 % 20011) - 10000) * 0.0137f;
    }
    const auto* data = reinterpret_cast<const std::byte*>(values.data());
    EXPECT_TRUE(
        WriteSafetensors(file_, {{"old_name",
                                  DType::kF32,
                                  {kRows, kColumns},
                                  absl::MakeConstSpan(data, values.size() * 4)},
                                 {"vector", DType::kF32, {2}, absl::MakeConstSpan(data, 8)},
                                 {"ints", DType::kI8, {2, 4}, absl::MakeConstSpan(data, 8)}})
            .ok());
    auto checkpoint = Checkpoint::Open(folder_.path());
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    checkpoint_ = std::make_shared<const Checkpoint>(*std::move(checkpoint));
  }
  TensorSpec Spec(DType dtype) const {
    return {.name = "table", .shape = {kRows, kColumns}, .dtype = dtype, .aliases = {"old_name"}};
  }

  TempFolder folder_;
  const std::string file_ = (folder_ / "model.safetensors").native();
  std::shared_ptr<const Checkpoint> checkpoint_;
};

TEST_F(HostTableTest, RowsAreThoseOfTheLoadedTableInEveryDType) {
  const std::vector<int64_t> rows = {3, 0, kRows - 1, 3, 1777, 42};
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    auto table = HostTable::Create(checkpoint_, Spec(dtype));
    ASSERT_TRUE(table.ok()) << table.status();
    EXPECT_EQ(table->num_rows(), kRows);
    EXPECT_EQ(table->row_bytes(), kColumns * DTypeBytes(dtype));
    std::vector<std::byte> whole(static_cast<size_t>(kRows * table->row_bytes()));
    ASSERT_TRUE(LoadTensors(*checkpoint_, {Spec(dtype)}, {whole.data()}, {.partial = true}).ok());
    std::vector<std::byte> got(rows.size() * static_cast<size_t>(table->row_bytes()));
    ASSERT_TRUE(table->ReadRows(rows, got.data()).ok());
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(std::memcmp(got.data() + i * static_cast<size_t>(table->row_bytes()),
                            whole.data() + rows[i] * table->row_bytes(),
                            static_cast<size_t>(table->row_bytes())),
                0)
          << "row " << rows[i] << " as " << DTypeName(dtype);
    }
  }
}

TEST_F(HostTableTest, KeepsItsCheckpoint) {
  auto table = HostTable::Create(std::move(checkpoint_), Spec(DType::kF32));
  ASSERT_TRUE(table.ok()) << table.status();
  std::vector<std::byte> row(static_cast<size_t>(table->row_bytes()));
  EXPECT_TRUE(table->ReadRows({7}, row.data()).ok());
}

TEST_F(HostTableTest, RefusesRowsThatDoNotExist) {
  auto table = HostTable::Create(checkpoint_, Spec(DType::kF32));
  std::vector<std::byte> row(static_cast<size_t>(table->row_bytes()));
  for (int64_t outside : {int64_t{-1}, kRows}) {
    EXPECT_EQ(table->ReadRows({outside}, row.data()).code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST_F(HostTableTest, RefusesWhatIsNoTable) {
  const auto refusal = [&](const TensorSpec& spec) {
    return std::string(HostTable::Create(checkpoint_, spec).status().message());
  };
  EXPECT_THAT(refusal({.name = "absent", .shape = {1, 1}}), HasSubstr("\"absent\""));
  EXPECT_THAT(refusal({.name = "vector", .shape = {2}}), HasSubstr("no table"));
  EXPECT_THAT(refusal({.name = "ints", .shape = {2, 4}}), HasSubstr("cannot be cast"));
  EXPECT_THAT(refusal({.name = "old_name", .shape = {kColumns, kRows}}), HasSubstr("shape"));
}

TEST_F(HostTableTest, AFileThatChangesIsNotReadFrom) {
  auto table = HostTable::Create(checkpoint_, Spec(DType::kBF16));
  std::vector<std::byte> row(static_cast<size_t>(table->row_bytes()));
  ASSERT_TRUE(table->ReadRows({kRows - 1}, row.data()).ok());
  ASSERT_EQ(truncate(file_.c_str(), 4096), 0);
  for (int64_t which : {kRows - 1, int64_t{0}}) {
    const absl::Status status = table->ReadRows({which}, row.data());
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("\"old_name\""), HasSubstr(file_), HasSubstr("truncated")));
  }
}

class FaultInTest : public testing::Test {
 protected:
  static constexpr int64_t kBytes = 40 << 20;

  FaultInTest() {
    const std::string content(kBytes, 'x');
    const std::string path = folder_.Write("weights", content);
    file_ = *MappedFile::Open(path);
    // Two ends that share a page with what is not asked for, and memory of our own.
    pieces_ = {{.source = file_.bytes().data() + 5000,
                .offset = 0,
                .bytes = (17 << 20) + 123,
                .file = &file_,
                .tensor = "a"},
               {.source = reinterpret_cast<const std::byte*>(own_.data()), .bytes = 100},
               {.source = file_.bytes().data() + (30 << 20),
                .offset = 0,
                .bytes = 77,
                .file = &file_,
                .tensor = "b"}};
  }
  // Of the mapping, in this process: by /proc, as mincore tells of the page cache. Its parts may be
  // listed one by one.
  int64_t MappedResidentKib() const {
    const auto first = reinterpret_cast<uintptr_t>(file_.bytes().data());
    std::ifstream in("/proc/self/smaps");
    bool here = false;
    int64_t kib = 0;
    for (std::string line; std::getline(in, line);) {
      if (uintptr_t begin = 0; std::sscanf(line.c_str(), "%" SCNxPTR "-", &begin) == 1 &&
                               line.find('-') < line.find(' ')) {
        here = begin >= first && begin < first + kBytes;
      }
      if (here && line.starts_with("Rss:")) kib += std::stoll(line.substr(4));
    }
    return kib;
  }

  TempFolder folder_;
  MappedFile file_;
  const std::string own_ = std::string(100, 'o');
  std::vector<PackPiece> pieces_;
};

TEST_F(FaultInTest, BringsThePagesOfThePiecesAndNoOthers) {
  for (int threads : {1, 3, 0}) {
    madvise(const_cast<std::byte*>(file_.bytes().data()), kBytes, MADV_DONTNEED);
    ASSERT_EQ(MappedResidentKib(), 0);
    auto stats = FaultIn(pieces_, threads);
    ASSERT_TRUE(stats.ok()) << stats.status();
    EXPECT_EQ(stats->bytes, (17 << 20) + 123 + 77);
    EXPECT_GE(stats->threads, 1);
    if (threads > 0) {
      EXPECT_LE(stats->threads, threads);
    }
    EXPECT_GT(stats->time, absl::ZeroDuration());
    EXPECT_GE(MappedResidentKib(), 17 << 10);
    // The page cache keeps, and maps, up to 2 MiB in one; not the half that nobody asked for.
    EXPECT_LE(MappedResidentKib(), 26 << 10);
  }
}

TEST_F(FaultInTest, NothingToDoIsNoError) {
  auto stats = FaultIn({}, 4);
  ASSERT_TRUE(stats.ok()) << stats.status();
  EXPECT_EQ(stats->bytes, 0);
}

TEST_F(FaultInTest, NamesTheTensorOfPagesThatAreGone) {
  ASSERT_EQ(truncate(file_.path().c_str(), 20 << 20), 0);
  const absl::Status status = FaultIn(pieces_, 2).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("tensor \"b\""), HasSubstr(file_.path().native())));
}

}  // namespace
}  // namespace dlo
