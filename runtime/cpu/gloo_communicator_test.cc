// Ranks are real processes, forked before libtorch has started a thread: so this process itself
// must not call libtorch.
#include "runtime/cpu/gloo_communicator.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/communicator_testing.h"

namespace dlo {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;

constexpr absl::Duration kPatience = absl::Seconds(90);

// What a rank tells the test before it exits.
struct Report {
  int code = -1;
  absl::Time at;
  std::vector<int> peers;
  std::string message;
};

std::string Encode(const absl::Status& status) {
  return absl::StrCat(status.raw_code(), "\n", absl::GetCurrentTimeNanos(), "\n",
                      absl::StrJoin(PeersOfError(status), ","), "\n", status.message());
}

Report Decode(const std::string& text) {
  const std::vector<std::string> lines = absl::StrSplit(text, absl::MaxSplits('\n', 3));
  if (lines.size() != 4) return {.message = absl::StrCat("no report: ", text)};
  Report report{.code = std::stoi(lines[0]),
                .at = absl::FromUnixNanos(std::stoll(lines[1])),
                .message = lines[3]};
  for (absl::string_view peer : absl::StrSplit(lines[2], ',', absl::SkipEmpty())) {
    report.peers.push_back(std::stoi(std::string(peer)));
  }
  return report;
}

// What a rank's body works with.
struct RankContext {
  int rank;
  int size;
  TcpStore* store;
  CommunicatorFactory* factory;
  absl::Duration operation_timeout;
  int progress_fd;

  absl::StatusOr<std::unique_ptr<Communicator>> Join() const {
    return factory->Create({.name = "g",
                            .rank = rank,
                            .size = size,
                            .setup_timeout = absl::Seconds(60),
                            .operation_timeout = operation_timeout});
  }
  void Progress() const { ASSERT_EQ(write(progress_fd, "p", 1), 1); }
};

// The processes of a group. Killed with it.
class Ranks {
 public:
  using Body = std::function<absl::Status(const RankContext&)>;

  Ranks(int size, absl::Duration operation_timeout, const Body& body) {
    sockaddr_in address{.sin_family = AF_INET, .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof(address);
    const int listen_fd = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT_EQ(bind(listen_fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listen_fd, 64), 0);
    EXPECT_EQ(getsockname(listen_fd, reinterpret_cast<sockaddr*>(&address), &length), 0);
    const int port = ntohs(address.sin_port);
    for (int rank = 0; rank < size; ++rank) {
      int report[2];
      int progress[2];
      EXPECT_EQ(pipe(report), 0);
      EXPECT_EQ(pipe(progress), 0);
      const pid_t parent = getpid();
      const pid_t pid = fork();
      if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        signal(SIGPIPE, SIG_IGN);
        if (rank != 0) close(listen_fd);
        const absl::Status status = Run(
            body, {rank, size, nullptr, nullptr, operation_timeout, progress[1]}, listen_fd, port);
        const std::string text = Encode(status);
        const ssize_t written = write(report[1], text.data(), text.size());
        _exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
      }
      EXPECT_GT(pid, 0);
      close(report[1]);
      close(progress[1]);
      pids_.push_back(pid);
      reports_.push_back(report[0]);
      progress_.push_back(progress[0]);
    }
    close(listen_fd);
  }

  ~Ranks() {
    for (pid_t pid : pids_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    for (int fd : reports_) close(fd);
    for (int fd : progress_) close(fd);
  }

  absl::Time Signal(int rank, int signal) {
    const absl::Time now = absl::Now();
    EXPECT_EQ(kill(pids_[rank], signal), 0);
    return now;
  }

  // Waits until the rank has made `count` further steps.
  void AwaitProgress(int rank, int count) {
    while (count > 0) {
      char byte;
      ASSERT_TRUE(Readable(progress_[rank], absl::Now() + kPatience)) << "rank " << rank;
      ASSERT_EQ(read(progress_[rank], &byte, 1), 1) << "rank " << rank << " ended early";
      --count;
    }
  }

  Report Await(int rank) {
    std::string text;
    char buffer[4096];
    const absl::Time deadline = absl::Now() + kPatience;
    while (Readable(reports_[rank], deadline)) {
      const ssize_t bytes = read(reports_[rank], buffer, sizeof(buffer));
      if (bytes <= 0) return Decode(text);
      text.append(buffer, bytes);
    }
    return {.message = absl::StrCat("rank ", rank, " did not end")};
  }

 private:
  static absl::Status Run(const Body& body, RankContext context, int listen_fd, int port) {
    auto store = context.rank == 0 ? TcpStore::Serve({.listen_fd = listen_fd})
                                   : TcpStore::Connect("127.0.0.1", port, absl::Seconds(60));
    if (!store.ok()) return store.status();
    auto factory = MakeGlooFactory(**store, "test", "127.0.0.1");
    context.store = store->get();
    context.factory = factory.get();
    return body(context);
  }

  static bool Readable(int fd, absl::Time deadline) {
    pollfd entry{.fd = fd, .events = POLLIN};
    const int64_t ms = std::max<int64_t>(absl::ToInt64Milliseconds(deadline - absl::Now()), 0);
    return poll(&entry, 1, static_cast<int>(ms)) > 0;
  }

  std::vector<pid_t> pids_;
  std::vector<int> reports_;
  std::vector<int> progress_;
};

int Code(absl::StatusCode code) { return static_cast<int>(code); }

class GlooCommunicator : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, GlooCommunicator, testing::Values(1, 2, 3, 4));

TEST_P(GlooCommunicator, DoesEveryOperationAtEverySize) {
  Ranks ranks(GetParam(), absl::Seconds(60), [](const RankContext& context) -> absl::Status {
    auto group = context.Join();
    if (!group.ok()) return group.status();
    const std::string problems = CheckCollectives(**group);
    return problems.empty() ? absl::OkStatus() : absl::InternalError(problems);
  });
  for (int rank = 0; rank < GetParam(); ++rank) {
    const Report report = ranks.Await(rank);
    EXPECT_EQ(report.code, 0) << report.message;
  }
}

// Gathers until an error ends it, telling of every operation.
absl::Status GatherForever(const RankContext& context, int64_t bytes) {
  auto group = context.Join();
  if (!group.ok()) return group.status();
  Bytes send(bytes);
  Bytes recv(bytes * context.size);
  absl::Status status;
  while (status.ok()) {
    status = (*group)->AllGather(send, absl::MakeSpan(recv));
    if (status.ok()) context.Progress();
  }
  const absl::Status later = (*group)->Barrier();
  if (later.code() != absl::StatusCode::kFailedPrecondition) {
    return absl::InternalError(absl::StrCat("not broken after ", status.ToString()));
  }
  return status;
}

// A timeout of an hour: only the loss of the connection can end the operations of the others.
TEST(GlooFaults, AKilledRankEndsTheGatherOfAllOthersWithinSeconds) {
  for (int victim = 0; victim < 3; ++victim) {
    SCOPED_TRACE(absl::StrCat("victim ", victim));
    Ranks ranks(3, absl::Hours(1),
                [](const RankContext& context) { return GatherForever(context, 8 << 20); });
    for (int rank = 0; rank < 3; ++rank) ranks.AwaitProgress(rank, 3);
    const absl::Time killed = ranks.Signal(victim, SIGKILL);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      const Report report = ranks.Await(rank);
      EXPECT_EQ(report.code, Code(absl::StatusCode::kUnavailable)) << report.message;
      EXPECT_THAT(report.message,
                  AllOf(HasSubstr(absl::StrCat("rank ", rank, " of group \"g\"")),
                        HasSubstr("AllGather #"), HasSubstr(absl::StrCat("peer ", victim))));
      EXPECT_THAT(report.peers, Contains(victim)) << report.message;
      EXPECT_LT(report.at - killed, absl::Seconds(10));
      RecordProperty(absl::StrCat("ms_after_kill_of_", victim, "_rank_", rank).c_str(),
                     std::to_string(absl::ToInt64Milliseconds(report.at - killed)));
    }
  }
}

// One way only, so that the sender has nothing to receive by which it would notice.
TEST(GlooFaults, AKilledReceiverOrSenderEndsTheTransferOfTheOther) {
  for (int victim : {0, 1}) {
    SCOPED_TRACE(absl::StrCat("victim ", victim));
    Ranks ranks(2, absl::Hours(1), [](const RankContext& context) -> absl::Status {
      auto group = context.Join();
      if (!group.ok()) return group.status();
      Bytes data(32 << 20);
      absl::Status status;
      while (status.ok()) {
        context.Progress();
        status = (*group)->Broadcast(absl::MakeSpan(data), 0);
      }
      return status;
    });
    for (int rank : {0, 1}) ranks.AwaitProgress(rank, 4);
    const absl::Time killed = ranks.Signal(victim, SIGKILL);
    const Report report = ranks.Await(1 - victim);
    EXPECT_EQ(report.code, Code(absl::StatusCode::kUnavailable)) << report.message;
    EXPECT_THAT(report.peers, testing::ElementsAre(victim)) << report.message;
    EXPECT_LT(report.at - killed, absl::Seconds(10));
  }
}

TEST(GlooFaults, AStoppedRankEndsTheGatherOfAllOthersAtTheDeadline) {
  constexpr absl::Duration kTimeout = absl::Seconds(2);
  Ranks ranks(3, kTimeout,
              [](const RankContext& context) { return GatherForever(context, 1 << 20); });
  for (int rank = 0; rank < 3; ++rank) ranks.AwaitProgress(rank, 3);
  const absl::Time stopped = ranks.Signal(1, SIGSTOP);
  bool blamed = false;
  for (int rank : {0, 2}) {
    const Report report = ranks.Await(rank);
    // The other may give up a moment earlier, which is then the first that is noticed.
    EXPECT_THAT(report.code, AnyOf(Code(absl::StatusCode::kDeadlineExceeded),
                                   Code(absl::StatusCode::kUnavailable)))
        << report.message;
    EXPECT_THAT(report.message, AllOf(HasSubstr("AllGather #"), HasSubstr("peer ")));
    EXPECT_LT(report.at - stopped, kTimeout + absl::Seconds(10));
    EXPECT_GT(report.at - stopped, kTimeout - absl::Seconds(1));
    blamed |= report.code == Code(absl::StatusCode::kDeadlineExceeded) &&
              testing::Value(report.peers, Contains(1));
    RecordProperty(absl::StrCat("ms_after_stop_rank_", rank).c_str(),
                   std::to_string(absl::ToInt64Milliseconds(report.at - stopped)));
  }
  EXPECT_TRUE(blamed);
}

TEST(GlooFaults, AbortFromAnotherThreadEndsAnOperationAndReachesThePeer) {
  Ranks ranks(2, absl::Hours(1), [](const RankContext& context) -> absl::Status {
    auto group = context.Join();
    if (!group.ok()) return group.status();
    absl::Status status = (*group)->Barrier();
    if (context.rank == 1) {
      // Joins only once rank 0 has given up.
      status = context.store->Get("aborted", absl::Now() + kPatience).status();
      (void)context.store->Set("seen", "1");
      return status.ok() ? (*group)->Barrier() : status;
    }
    Bytes data(1 << 20);
    std::thread aborter([&] {
      while ((*group)->sequence() < 2) std::this_thread::yield();
      (*group)->Abort("the wave was given up");
    });
    if (status.ok()) status = (*group)->Broadcast(absl::MakeSpan(data), 0);
    aborter.join();
    (void)context.store->Set("aborted", "1");
    // This rank serves the store.
    (void)context.store->Get("seen", absl::Now() + kPatience);
    return status;
  });
  const Report aborted = ranks.Await(0);
  EXPECT_EQ(aborted.code, Code(absl::StatusCode::kAborted)) << aborted.message;
  EXPECT_THAT(aborted.message,
              AllOf(HasSubstr("Broadcast #2"), HasSubstr("the wave was given up")));
  const Report peer = ranks.Await(1);
  EXPECT_EQ(peer.code, Code(absl::StatusCode::kUnavailable)) << peer.message;
  EXPECT_THAT(peer.peers, testing::ElementsAre(0));
}

// Gloo itself ends the process of a rank whose peer sends more than it expects.
TEST(GlooFaults, SizesThatDifferAreAnErrorOnBothSides) {
  Ranks ranks(2, absl::Seconds(20), [](const RankContext& context) -> absl::Status {
    auto group = context.Join();
    if (!group.ok()) return group.status();
    const int64_t bytes = context.rank == 0 ? 1000 : 2000;
    Bytes send(bytes);
    Bytes recv(2 * bytes);
    return (*group)->AllGather(send, absl::MakeSpan(recv));
  });
  const std::vector<Report> reports = {ranks.Await(0), ranks.Await(1)};
  bool named = false;
  for (const Report& report : reports) {
    EXPECT_THAT(report.code,
                AnyOf(Code(absl::StatusCode::kInternal), Code(absl::StatusCode::kUnavailable)))
        << report.message;
    named |= testing::Value(report.message, AllOf(HasSubstr("out of step"), HasSubstr("1000 bytes"),
                                                  HasSubstr("2000 bytes")));
  }
  EXPECT_TRUE(named);
}

TEST(GlooFaults, RanksThatDoNotComeAreNamed) {
  Ranks ranks(3, absl::Seconds(20), [](const RankContext& context) -> absl::Status {
    if (context.rank == 2) {
      return context.store->Get("end", absl::Now() + kPatience).status();
    }
    const absl::Status status =
        context.factory
            ->Create(
                {.name = "g", .rank = context.rank, .size = 3, .setup_timeout = absl::Seconds(1)})
            .status();
    // Rank 0 serves the store to the others.
    (void)context.store->Set(absl::StrCat("done", context.rank), "1");
    if (context.rank == 0) (void)context.store->Get("done1", absl::Now() + kPatience);
    return status;
  });
  for (int rank : {0, 1}) {
    const Report report = ranks.Await(rank);
    EXPECT_EQ(report.code, Code(absl::StatusCode::kDeadlineExceeded)) << report.message;
    EXPECT_THAT(report.message, HasSubstr("rank 2 did not come within 1s"));
    EXPECT_THAT(report.peers, testing::ElementsAre(2));
  }
}

TEST(TcpStore, TellsWhatItCannotDo) {
  Ranks ranks(1, absl::Seconds(20), [](const RankContext& context) -> absl::Status {
    struct Row {
      absl::Status status;
      absl::StatusCode code;
      const char* names;
    };
    const TcpStore& store = *context.store;
    const Row rows[] = {
        {TcpStore::Serve({.host = "nowhere"}).status(), absl::StatusCode::kInvalidArgument,
         "nowhere"},
        {TcpStore::Serve({.port = 70000}).status(), absl::StatusCode::kInvalidArgument, "70000"},
        {TcpStore::Serve({.host = "127.0.0.1", .port = store.port()}).status(),
         absl::StatusCode::kUnavailable, "127.0.0.1:"},
        {TcpStore::Serve({.host = "203.0.113.1"}).status(), absl::StatusCode::kUnavailable,
         "203.0.113.1"},
        {TcpStore::Serve({.listen_fd = 999}).status(), absl::StatusCode::kInvalidArgument, "999"},
        {TcpStore::Connect("127.0.0.1", 0, absl::Seconds(1)).status(),
         absl::StatusCode::kInvalidArgument, "port 0"},
        {TcpStore::Connect("127.0.0.1", 1, absl::Milliseconds(300)).status(),
         absl::StatusCode::kUnavailable, "127.0.0.1:1"},
        {context.store->Get("absent", absl::Now() + absl::Milliseconds(100)).status(),
         absl::StatusCode::kDeadlineExceeded, "absent"},
    };
    for (const Row& row : rows) {
      if (row.status.code() != row.code ||
          !testing::Value(std::string(row.status.message()), HasSubstr(row.names))) {
        return absl::InternalError(absl::StrCat("for ", row.names, ": ", row.status.ToString()));
      }
    }
    auto set = context.store->Set("key", std::string("a\0b", 3));
    auto value = context.store->Get("key", absl::Now() + absl::Seconds(5));
    if (!set.ok() || !value.ok()) return absl::InternalError("set and get");
    if (*value != std::string("a\0b", 3)) return absl::InternalError("another value");
    return absl::OkStatus();
  });
  const Report report = ranks.Await(0);
  EXPECT_EQ(report.code, 0) << report.message;
}

}  // namespace
}  // namespace dlo
