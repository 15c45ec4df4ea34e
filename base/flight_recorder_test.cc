#include "base/flight_recorder.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace dlo {
namespace {

using testing::HasSubstr;
using testing::SizeIs;

std::unique_ptr<FlightRecorder> Writer(const FlightMemory& memory) {
  auto recorder = FlightRecorder::Open(dup(memory.fd()));
  EXPECT_TRUE(recorder.ok()) << recorder.status();
  return *std::move(recorder);
}

FlightMemory NewMemory() {
  auto memory = FlightMemory::Create();
  EXPECT_TRUE(memory.ok()) << memory.status();
  return *std::move(memory);
}

TEST(FlightRecorderTest, TellsWhatWasDoneWhereAndHowItEnded) {
  const FlightMemory memory = NewMemory();
  auto recorder = Writer(memory);
  const int weights = recorder->AddGroup("weights/0");
  const absl::Time before = absl::Now();
  const FlightToken load = recorder->Begin(FlightOp::kLoad);
  recorder->End(load, true);
  recorder->SetWave(7);
  recorder->SetStage(FlightStage::kDenoise);
  recorder->SetStep(3);
  recorder->SetVisit(120);
  const FlightToken failed = recorder->Begin(FlightOp::kSendRecv, weights, 41, /*peer=*/2);
  recorder->End(failed, false);
  recorder->Begin(FlightOp::kAllGather, weights, 42);

  const FlightLog log = memory.Read();
  EXPECT_EQ(log.begun, 3u);
  EXPECT_EQ(log.torn, 0);
  ASSERT_THAT(log.records, SizeIs(3));
  EXPECT_EQ(log.records[0].op, FlightOp::kLoad);
  EXPECT_EQ(log.records[0].state, FlightState::kDone);
  EXPECT_EQ(log.records[0].place, FlightPlace());
  EXPECT_GE(log.records[0].begin, before - absl::Milliseconds(1));
  EXPECT_LE(log.records[0].begin, absl::Now());
  EXPECT_EQ(log.records[1].state, FlightState::kFailed);
  EXPECT_EQ(log.records[1].peer, 2);
  EXPECT_EQ(log.records[2].state, FlightState::kBegun);
  EXPECT_EQ(log.records[2].peer, -1);
  EXPECT_EQ(log.records[2].sequence, 3u);
  EXPECT_EQ(log.records[2].OpText(), "AllGather #42 of weights/0");
  EXPECT_EQ(PlaceText(log.records[2].place), "wave 7, denoise, step 3, visit 120");
  EXPECT_EQ(recorder->place(), log.records[2].place);
  EXPECT_THAT(FlightLogText(log, 1),
              testing::AllOf(HasSubstr("AllGather #42 of weights/0  (wave 7, denoise, step 3, "
                                       "visit 120)  unfinished\n"),
                             testing::Not(HasSubstr("#1 "))));
}

TEST(FlightRecorderTest, KeepsTheLast4096Operations) {
  const FlightMemory memory = NewMemory();
  auto recorder = Writer(memory);
  const FlightToken first = recorder->Begin(FlightOp::kWave);
  for (int i = 2; i <= 10'000; ++i) {
    recorder->End(recorder->Begin(FlightOp::kVisit, -1, static_cast<uint64_t>(i)), true);
  }
  // Its record is another's by now.
  recorder->End(first, false);
  const FlightLog log = memory.Read();
  EXPECT_EQ(log.begun, 10'000u);
  EXPECT_EQ(log.torn, 0);
  ASSERT_THAT(log.records, SizeIs(4096));
  for (size_t i = 0; i < log.records.size(); ++i) {
    EXPECT_EQ(log.records[i].sequence, 10'000 - 4095 + i);
    EXPECT_EQ(log.records[i].group_sequence, log.records[i].sequence);
    EXPECT_EQ(log.records[i].state, FlightState::kDone);
  }
}

// A record whose parts belong together: the peer follows from the group's sequence.
int PeerOf(uint64_t sequence) { return static_cast<int>(sequence * 7 % 1000); }

void WriteOn(FlightRecorder& recorder, const std::atomic<bool>& stop) {
  for (uint64_t i = 1; !stop; ++i) {
    recorder.End(recorder.Begin(FlightOp::kBroadcast, 0, i, PeerOf(i)), true);
  }
}

void ExpectWhole(const FlightLog& log) {
  for (const FlightRecord& record : log.records) {
    ASSERT_EQ(record.op, FlightOp::kBroadcast);
    ASSERT_EQ(record.peer, PeerOf(record.group_sequence)) << record.sequence;
  }
}

TEST(FlightRecorderTest, ManyWritersAndAReaderNeverMixRecords) {
  const FlightMemory memory = NewMemory();
  auto recorder = Writer(memory);
  recorder->AddGroup("g");
  std::atomic<bool> stop = false;
  std::vector<std::thread> writers;
  for (int i = 0; i < 3; ++i) writers.emplace_back([&] { WriteOn(*recorder, stop); });
  const absl::Time end = absl::Now() + absl::Seconds(20);
  for (int reads = 0; reads < 100 && absl::Now() < end; ++reads) ExpectWhole(memory.Read());
  stop = true;
  for (std::thread& writer : writers) writer.join();
  const FlightLog log = memory.Read();
  ExpectWhole(log);
  // A writer that slept while the others went once around may have spoiled a record.
  EXPECT_LE(log.torn, 3);
}

TEST(FlightRecorderTest, IsReadableAfterItsWriterWasKilledInTheMiddle) {
  for (int round = 0; round < 20; ++round) {
    const FlightMemory memory = NewMemory();
    const pid_t pid = fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      auto recorder = FlightRecorder::Open(dup(memory.fd()));
      const std::atomic<bool> stop = false;
      std::thread second([&] { WriteOn(**recorder, stop); });
      WriteOn(**recorder, stop);
    }
    const absl::Time end = absl::Now() + absl::Seconds(20);
    while (memory.Read().begun < 5000u + static_cast<uint64_t>(round) * 997 && absl::Now() < end) {
    }
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    ASSERT_TRUE(WIFSIGNALED(status));
    const FlightLog log = memory.Read();
    ExpectWhole(log);
    EXPECT_GE(log.begun, 5000u);
    // What each was writing, and what one left that the other overtook by a whole round.
    EXPECT_LE(log.torn, 4);
    EXPECT_GE(log.records.size(), 4092u);
    int unfinished = 0;
    for (const FlightRecord& record : log.records) {
      if (record.state == FlightState::kBegun) ++unfinished;
    }
    EXPECT_LE(unfinished, 2);
  }
}

class FlightFileTest : public testing::Test {
 protected:
  FlightFileTest() {
    std::string pattern = (std::filesystem::temp_directory_path() / "flight-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    path_ = (folder_ / "recorder").string();
  }
  ~FlightFileTest() override { std::filesystem::remove_all(folder_); }

  void Overwrite(off_t offset, const std::string& bytes) const {
    const int fd = open(path_.c_str(), O_WRONLY);
    ASSERT_EQ(pwrite(fd, bytes.data(), bytes.size(), offset), static_cast<ssize_t>(bytes.size()));
    close(fd);
  }

  std::filesystem::path folder_;
  std::string path_;
};

TEST_F(FlightFileTest, ATornRecordIsCountedAndLeftOut) {
  auto recorder = FlightRecorder::OpenFile(path_);
  ASSERT_TRUE(recorder.ok()) << recorder.status();
  for (int i = 0; i < 5; ++i) (*recorder)->Begin(FlightOp::kStep);
  // The wave's number of record 3, as a writer leaves it that dies after the first words.
  Overwrite(4096 + 3 * 64 + 16, "\x05");
  const absl::StatusOr<FlightLog> log = ReadFlightFile(path_);
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_EQ(log->torn, 1);
  std::vector<uint64_t> left;
  for (const FlightRecord& record : log->records) left.push_back(record.sequence);
  EXPECT_THAT(left, testing::ElementsAre(1, 2, 4, 5));
}

TEST_F(FlightFileTest, NothingInTheMemoryIsTrusted) {
  std::mt19937 random(1);
  for (int round = 0; round < 20; ++round) {
    auto recorder = FlightRecorder::OpenFile(path_);
    ASSERT_TRUE(recorder.ok()) << recorder.status();
    (*recorder)->Begin(FlightOp::kStep);
    std::string noise(4096 + 4096 * 64 - 8, '\0');
    for (char& byte : noise) byte = static_cast<char>(random());
    Overwrite(8, noise);
    const FlightLog log = (*recorder)->Read();
    EXPECT_THAT(log.records, testing::IsEmpty());
    FlightLogText(log, 10);
  }
}

TEST_F(FlightFileTest, WhatIsNoRecorderIsRefusedAndAFileOfSomethingElseIsLeftAlone) {
  EXPECT_TRUE(absl::IsNotFound(ReadFlightFile(path_).status()));
  std::filesystem::copy_file("/etc/passwd", path_);
  const auto size = std::filesystem::file_size(path_);
  EXPECT_TRUE(absl::IsInvalidArgument(ReadFlightFile(path_).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(FlightRecorder::OpenFile(path_).status()));
  EXPECT_EQ(std::filesystem::file_size(path_), size);
  EXPECT_TRUE(absl::IsInvalidArgument(FlightRecorder::Open(open(path_.c_str(), O_RDWR)).status()));
}

TEST(FlightRecorderTest, ItsMemoryCannotBeShrunkUnderTheReader) {
  const FlightMemory memory = NewMemory();
  EXPECT_EQ(ftruncate(memory.fd(), 0), -1);
  EXPECT_EQ(errno, EPERM);
}

TEST(FlightRecorderTest, AScopeIsAnOperation) {
  auto recorder = FlightRecorder::Private();
  {
    const FlightScope load(recorder.get(), FlightOp::kLoad);
  }
  {
    FlightScope wave(recorder.get(), FlightOp::kWave);
    wave.Fail();
  }
  const FlightScope nothing(nullptr, FlightOp::kWave);
  const FlightLog log = recorder->Read();
  ASSERT_THAT(log.records, SizeIs(2));
  EXPECT_EQ(log.records[0].state, FlightState::kDone);
  EXPECT_EQ(log.records[1].state, FlightState::kFailed);
}

}  // namespace
}  // namespace dlo
