#include "server/job_store.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class JobStoreTest : public testing::Test {
 protected:
  JobStoreTest() {
    std::string pattern = (fs::temp_directory_path() / "job-store-XXXXXX").string();
    parent_ = mkdtemp(pattern.data());
    folder_ = parent_ / "data";
  }
  ~JobStoreTest() override { fs::remove_all(parent_); }

  std::unique_ptr<JobStore> Open(int64_t bytes_max = 1 << 30) {
    auto store = JobStore::Open({.folder = folder_, .bytes_max = bytes_max});
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? *std::move(store) : nullptr;
  }

  static absl::Status Do(JobStore& store, const JobStore::Operation& operation) {
    return store.Transaction({operation}).at(0);
  }
  static absl::Status Insert(JobStore& store, const std::string& id, int state = 1) {
    return Do(store, [&](JobStore& s) {
      return s.Insert({.id = id, .state = state, .request = "request of " + id, .job = "job"});
    });
  }
  static absl::Status End(JobStore& store, const std::string& id, absl::Time expire_time,
                          int64_t result_bytes = 0) {
    return Do(store, [&](JobStore& s) {
      return s.Update({.id = id,
                       .state = 5,
                       .expire_time = expire_time,
                       .result_bytes = result_bytes,
                       .request = {},
                       .job = "ended"});
    });
  }
  static std::vector<std::string> Ids(const absl::StatusOr<std::vector<JobRecord>>& records) {
    std::vector<std::string> ids;
    EXPECT_TRUE(records.ok()) << records.status();
    if (records.ok()) {
      for (const JobRecord& record : *records) ids.push_back(record.id);
    }
    return ids;
  }
  // The result of `id`, put in place.
  static void WriteResult(JobStore& store, const std::string& id, const std::string& bytes) {
    absl::StatusOr<AtomicFile> writer = CreateResult(store.ResultPath(id));
    ASSERT_TRUE(writer.ok()) << writer.status();
    ASSERT_TRUE(writer->Write(bytes).ok());
    ASSERT_TRUE(writer->Commit().ok());
  }
  std::vector<std::string> ResultFiles() const {
    std::vector<std::string> names;
    for (const auto& file : fs::directory_iterator(folder_ / "results")) {
      names.push_back(file.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  fs::path parent_;
  fs::path folder_;
};

TEST_F(JobStoreTest, WhatWasWrittenIsThereAfterReopening) {
  const absl::Time time = absl::FromUnixMicros(1234567890123456);
  {
    const auto store = Open();
    ASSERT_TRUE(Do(*store, [&](JobStore& s) {
                  return s.Insert({.id = "..",
                                   .state = 1,
                                   .deadline = time,
                                   .request = std::string("\0\xff", 2),
                                   .job = ""});
                }).ok());
    ASSERT_TRUE(Insert(*store, "b", 2).ok());
    ASSERT_TRUE(Insert(*store, "c").ok());
    WriteResult(*store, "c", "video");
    ASSERT_TRUE(End(*store, "c", time, 5).ok());
  }
  const auto store = Open();
  const auto unfinished = store->Unfinished();
  EXPECT_THAT(Ids(unfinished), ElementsAre("..", "b"));
  EXPECT_EQ(unfinished->at(0).deadline, time);
  EXPECT_EQ(unfinished->at(0).request, std::string("\0\xff", 2));
  EXPECT_EQ(unfinished->at(0).job, "");
  EXPECT_EQ(unfinished->at(1).state, 2);
  const auto ended = store->Find("c");
  ASSERT_TRUE(ended.ok() && ended->has_value()) << ended.status();
  EXPECT_EQ((*ended)->expire_time, time);
  EXPECT_EQ((*ended)->result_bytes, 5);
  EXPECT_EQ((*ended)->request, "request of c");
  EXPECT_EQ((*ended)->job, "ended");
  const auto reader = ResultReader::Open(store->ResultPath("c"));
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(*reader->Read(2, 100), "deo");
  EXPECT_FALSE(store->Find("d")->has_value());
}

TEST_F(JobStoreTest, TheFolderAndItsFilesAreTheOwnersOnly) {
  const auto store = Open();
  ASSERT_TRUE(Insert(*store, "a").ok());
  WriteResult(*store, "a", "x");
  struct stat info;
  for (const char* name : {"", "jobs.db", "jobs.db-wal", "results", "results/a.result", "lock"}) {
    ASSERT_EQ(stat((folder_ / name).c_str(), &info), 0) << name;
    EXPECT_EQ(info.st_mode & 077, 0u) << name;
  }
}

TEST_F(JobStoreTest, AnIdIsTakenUntilItsJobIsRemoved) {
  const auto store = Open();
  EXPECT_TRUE(Insert(*store, "a").ok());
  EXPECT_EQ(Insert(*store, "a").code(), absl::StatusCode::kAlreadyExists);
  WriteResult(*store, "a", "video");
  EXPECT_TRUE(Do(*store, [](JobStore& s) {
                EXPECT_TRUE(*s.Remove("a"));
                EXPECT_FALSE(*s.Remove("a"));
                return absl::OkStatus();
              }).ok());
  EXPECT_THAT(ResultFiles(), IsEmpty());
  EXPECT_EQ(End(*store, "a", absl::Now()).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(Insert(*store, "a").ok());
}

TEST_F(JobStoreTest, ListsTheNewestFirstByStateAndPage) {
  const auto store = Open();
  for (int i = 0; i < 9; ++i) ASSERT_TRUE(Insert(*store, absl::StrCat(i), i % 3).ok());
  EXPECT_THAT(Ids(store->List({}, 0, 4)), ElementsAre("8", "7", "6", "5"));
  EXPECT_THAT(Ids(store->List({2}, 0, 4)), ElementsAre("8", "5", "2"));
  EXPECT_THAT(Ids(store->List({2, 0, 2}, 0, 4)), ElementsAre("8", "6", "5", "3"));
  const int64_t before = store->List({2, 0}, 0, 4)->back().sequence;
  EXPECT_THAT(Ids(store->List({2, 0}, before, 4)), ElementsAre("2", "0"));
  EXPECT_THAT(Ids(store->List({7}, 0, 4)), IsEmpty());
}

TEST_F(JobStoreTest, RemovesWhatHasExpiredWithItsResult) {
  const auto store = Open();
  const absl::Time now = absl::Now();
  EXPECT_EQ(*store->NextExpiry(), absl::InfiniteFuture());
  for (const char* id : {"a", "b", "waiting"}) ASSERT_TRUE(Insert(*store, id).ok());
  WriteResult(*store, "a", "1");
  WriteResult(*store, "b", "1");
  ASSERT_TRUE(End(*store, "a", now, 1).ok());
  ASSERT_TRUE(End(*store, "b", now + absl::Seconds(1), 1).ok());
  ASSERT_TRUE(Do(*store, [now](JobStore& s) { return s.RemoveExpired(now).status(); }).ok());
  EXPECT_THAT(Ids(store->List({}, 0, 9)), ElementsAre("waiting", "b"));
  EXPECT_THAT(ResultFiles(), ElementsAre("b.result"));
  EXPECT_EQ(absl::ToUnixMicros(*store->NextExpiry()), absl::ToUnixMicros(now) + 1000000);
}

TEST_F(JobStoreTest, RemovesTheOldestEndedJobsForRoomAndKeepsTheNewest) {
  const auto store = Open(/*bytes_max=*/2500);
  const absl::Time now = absl::Now();
  int removed = 0;
  const auto make_room = [&removed](JobStore& s) {
    removed = *s.RemoveForRoom();
    return absl::OkStatus();
  };
  ASSERT_TRUE(Insert(*store, "waiting").ok());
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(Insert(*store, absl::StrCat(i)).ok());
    WriteResult(*store, absl::StrCat(i), std::string(1000, 'x'));
    ASSERT_TRUE(End(*store, absl::StrCat(i), now + absl::Seconds(i), 1000).ok());
  }
  ASSERT_TRUE(Do(*store, make_room).ok());
  EXPECT_EQ(removed, 2);
  EXPECT_THAT(ResultFiles(), ElementsAre("2.result", "3.result"));
  ASSERT_TRUE(Insert(*store, "big").ok());
  ASSERT_TRUE(End(*store, "big", now + absl::Seconds(9), 5000).ok());
  ASSERT_TRUE(Do(*store, make_room).ok());
  EXPECT_THAT(Ids(store->List({}, 0, 9)), ElementsAre("big", "waiting"));
  ASSERT_TRUE(Do(*store, make_room).ok());
  EXPECT_EQ(removed, 0);
}

TEST_F(JobStoreTest, OneBadOperationDoesNotUndoItsNeighbours) {
  const auto store = Open();
  ASSERT_TRUE(Insert(*store, "a").ok());
  int runs = 0;
  const std::vector<absl::Status> statuses = store->Transaction({
      [&](JobStore& s) { return s.Insert({.id = "b", .state = 1, .request = {}, .job = {}}); },
      [&](JobStore& s) -> absl::Status {
        ++runs;
        const absl::Status inserted =
            s.Insert({.id = absl::StrCat("bad", runs), .state = 1, .request = {}, .job = {}});
        return inserted.ok() ? absl::InternalError("after a change") : inserted;
      },
      [&](JobStore& s) { return s.Insert({.id = "a", .state = 1, .request = {}, .job = {}}); },
      [&](JobStore& s) { return s.Insert({.id = "c", .state = 1, .request = {}, .job = {}}); },
  });
  EXPECT_TRUE(statuses[0].ok());
  EXPECT_EQ(statuses[1].code(), absl::StatusCode::kInternal);
  EXPECT_EQ(statuses[2].code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(statuses[3].ok());
  EXPECT_EQ(runs, 2);
  EXPECT_THAT(Ids(store->Unfinished()), ElementsAre("a", "b", "c"));
}

TEST_F(JobStoreTest, ASecondServerIsRefusedWithTheProcessThatHasTheFolder) {
  const auto first = Open();
  const auto second = JobStore::Open({.folder = folder_});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(second.status().message(), HasSubstr(folder_.string()));
  EXPECT_THAT(second.status().message(), HasSubstr(absl::StrCat("process ", getpid())));
  EXPECT_THAT(second.status().message(), HasSubstr("--data-dir"));
}

TEST_F(JobStoreTest, AFileThatIsNoDatabaseIsNamedWithTheWayOut) {
  Open();
  for (const char* name : {"jobs.db-wal", "jobs.db-shm"}) fs::remove(folder_ / name);
  std::ofstream(folder_ / "jobs.db") << std::string(8192, 'x');
  const auto store = JobStore::Open({.folder = folder_});
  EXPECT_EQ(store.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(store.status().message(), HasSubstr((folder_ / "jobs.db").string()));
  EXPECT_THAT(store.status().message(), HasSubstr("move"));
  // The way out is one.
  fs::rename(folder_ / "jobs.db", folder_ / "old");
  EXPECT_NE(Open(), nullptr);
}

TEST_F(JobStoreTest, ADamagedDatabaseIsFoundWhenItIsOpened) {
  {
    const auto store = Open();
    for (int i = 0; i < 200; ++i) {
      ASSERT_TRUE(Insert(*store, absl::StrCat(i, std::string(500, 'i'))).ok());
    }
  }
  // Every page but the first.
  const int64_t size = fs::file_size(folder_ / "jobs.db");
  ASSERT_GT(size, 8192);
  std::fstream file(folder_ / "jobs.db", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(4096);
  file << std::string(size - 4096, '\xa5');
  file.close();
  const auto store = JobStore::Open({.folder = folder_});
  EXPECT_EQ(store.status().code(), absl::StatusCode::kDataLoss) << store.status();
  EXPECT_THAT(store.status().message(), HasSubstr((folder_ / "jobs.db").string()));
}

TEST_F(JobStoreTest, ADatabaseOfALaterVersionIsLeftAlone) {
  Open();
  // user_version stands big-endian at byte 60 of the file.
  std::fstream file(folder_ / "jobs.db", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(60);
  file.write("\0\0\0\x63", 4);
  file.close();
  const auto store = JobStore::Open({.folder = folder_});
  EXPECT_EQ(store.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(store.status().message(), HasSubstr("format 99"));
}

TEST_F(JobStoreTest, AFolderThatCannotBeMadeIsNamed) {
  std::ofstream(parent_ / "file").flush();
  const auto store = JobStore::Open({.folder = parent_ / "file" / "data"});
  EXPECT_EQ(store.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(store.status().message(), HasSubstr((parent_ / "file" / "data").string()));
}

TEST_F(JobStoreTest, ResultsWithoutARecordAreRemovedOnOpening) {
  {
    const auto store = Open();
    ASSERT_TRUE(Insert(*store, "running").ok());
    ASSERT_TRUE(Insert(*store, "ended").ok());
    WriteResult(*store, "running", "in place, but the record did not follow");
    WriteResult(*store, "ended", "video");
    ASSERT_TRUE(End(*store, "ended", absl::Now(), 5).ok());
    std::ofstream(folder_ / "results/77.0.partial") << "half";
    std::ofstream(folder_ / "results/notes.txt") << "somebody else's";
  }
  Open();
  EXPECT_THAT(ResultFiles(), ElementsAre("ended.result", "notes.txt"));
}

TEST_F(JobStoreTest, AnAbandonedWriterLeavesNothing) {
  const auto store = Open();
  {
    absl::StatusOr<AtomicFile> writer = CreateResult(store->ResultPath("a"));
    ASSERT_TRUE(writer->Write("half").ok());
    EXPECT_EQ(ResultFiles().size(), 1u);
  }
  EXPECT_THAT(ResultFiles(), IsEmpty());
}

TEST_F(JobStoreTest, AFullDiskIsResourceExhaustedAndNamesTheFile) {
  const auto store = Open();
  signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit limit = before;
  limit.rlim_cur = 1000;
  setrlimit(RLIMIT_FSIZE, &limit);
  absl::StatusOr<AtomicFile> writer = CreateResult(store->ResultPath("a"));
  const absl::Status written = writer->Write(std::string(2000, 'x'));
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(written.code(), absl::StatusCode::kResourceExhausted) << written;
  EXPECT_THAT(written.message(), HasSubstr((folder_ / "results").string()));
}

// A process that writes as fast as it can, killed in the middle: what it was told is durable is
// there, nothing is half there, and no file is left that no record speaks of.
TEST_F(JobStoreTest, AProcessKilledInTheMiddleOfItsWritesLosesNothingThatItWasPromised) {
  int64_t promised_before = 0;
  for (int round = 0; round < 5; ++round) {
    int pipe_fds[2];
    ASSERT_EQ(pipe(pipe_fds), 0);
    const pid_t pid = fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      close(pipe_fds[0]);
      auto store = JobStore::Open({.folder = folder_, .bytes_max = 1 << 30});
      if (!store.ok()) _exit(1);
      for (int i = 0;; ++i) {
        const std::string id = absl::StrCat(round, "-", i);
        if (!Insert(**store, id).ok()) _exit(2);
        auto writer = CreateResult((*store)->ResultPath(id));
        if (!writer.ok() || !writer->Write(id).ok() || !writer->Commit().ok()) _exit(3);
        if (!End(**store, id, absl::InfiniteFuture() - absl::Hours(1),
                 static_cast<int64_t>(id.size()))
                 .ok()) {
          _exit(4);
        }
        if (write(pipe_fds[1], &i, sizeof(i)) != sizeof(i)) _exit(5);
      }
    }
    close(pipe_fds[1]);
    int promised = -1;
    int value = 0;
    // A different place in its work each time.
    for (int i = 0; i < 20 + 7 * round; ++i) {
      ASSERT_EQ(read(pipe_fds[0], &value, sizeof(value)), static_cast<ssize_t>(sizeof(value)));
      promised = value;
    }
    kill(pid, SIGKILL);
    while (read(pipe_fds[0], &value, sizeof(value)) == sizeof(value)) promised = value;
    close(pipe_fds[0]);
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    ASSERT_TRUE(WIFSIGNALED(status)) << status;

    const auto store = Open();
    for (int i = 0; i <= promised; ++i) {
      const std::string id = absl::StrCat(round, "-", i);
      const auto record = store->Find(id);
      ASSERT_TRUE(record.ok() && record->has_value()) << id << record.status();
      EXPECT_EQ((*record)->job, "ended");
      const auto reader = ResultReader::Open(store->ResultPath(id));
      ASSERT_TRUE(reader.ok()) << reader.status();
      EXPECT_EQ(*reader->Read(0, 100), id);
    }
    promised_before += promised + 1;
    const auto all = store->List({5}, 0, 1 << 20);
    ASSERT_TRUE(all.ok());
    EXPECT_GE(static_cast<int64_t>(all->size()), promised_before);
    EXPECT_EQ(ResultFiles().size(), all->size());
    promised_before = static_cast<int64_t>(all->size());
  }
}

}  // namespace
}  // namespace dlo
