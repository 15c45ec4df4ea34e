#include "runtime/cpu/thread_communicator.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "runtime/communicator_host.h"

namespace dlo {
namespace {

// A message that its sender keeps in place until a receiver has copied it.
struct Message {
  enum class State { kPosted, kCopying, kDone };
  uint32_t tag;
  const std::byte* data;
  int64_t bytes;
  State state = State::kPosted;
};

// What the ranks of a group share. std's mutex and condition variable on the system clock are those
// that ThreadSanitizer intercepts.
struct Group {
  explicit Group(int group_size)
      : size(group_size),
        joined(group_size),
        closed(group_size),
        interrupted(group_size),
        queues(group_size * group_size) {}

  std::deque<Message*>& Queue(int from, int to) { return queues[from * size + to]; }

  // False if the deadline passed first.
  template <typename Condition>
  bool WaitFor(std::unique_lock<std::mutex>& lock, absl::Time deadline, Condition condition) {
    if (deadline == absl::InfinitePast()) return condition();
    return changed.wait_until(lock, absl::ToChronoTime(deadline), condition);
  }

  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  // By rank; all below guarded by mutex. Not vector<bool>: sanitizers see bytes.
  std::vector<char> joined;
  std::vector<char> closed;
  std::vector<char> interrupted;
  std::vector<std::deque<Message*>> queues;
};

absl::Status Gone(int peer) {
  return PeerError(absl::StatusCode::kUnavailable, {peer},
                   absl::StrCat("peer ", peer, " left the group"));
}

absl::Status Late(int peer) {
  return PeerError(absl::StatusCode::kDeadlineExceeded, {peer},
                   absl::StrCat("waited for peer ", peer));
}

absl::Status Interrupted() { return absl::AbortedError("interrupted"); }

class SendTransfer : public Transfer {
 public:
  SendTransfer(std::shared_ptr<Group> group, int rank, int peer, uint32_t tag,
               const std::byte* data, int64_t bytes)
      : group_(std::move(group)), rank_(rank), peer_(peer), message_{tag, data, bytes} {
    std::lock_guard<std::mutex> lock(group_->mutex);
    group_->Queue(rank_, peer_).push_back(&message_);
    group_->changed.notify_all();
  }

  ~SendTransfer() override {
    std::unique_lock<std::mutex> lock(group_->mutex);
    std::deque<Message*>& queue = group_->Queue(rank_, peer_);
    queue.erase(std::remove(queue.begin(), queue.end(), &message_), queue.end());
    group_->changed.wait(lock, [this] { return message_.state != Message::State::kCopying; });
  }

  absl::Status Wait(absl::Time deadline) override {
    std::unique_lock<std::mutex> lock(group_->mutex);
    const bool in_time = group_->WaitFor(lock, deadline, [this] {
      return message_.state != Message::State::kPosted || group_->closed[peer_] ||
             group_->interrupted[rank_];
    });
    // A copy that has begun takes no longer than the copy.
    group_->changed.wait(lock, [this] { return message_.state != Message::State::kCopying; });
    if (message_.state == Message::State::kDone) return absl::OkStatus();
    if (group_->interrupted[rank_]) return Interrupted();
    return in_time ? Gone(peer_) : Late(peer_);
  }

 private:
  const std::shared_ptr<Group> group_;
  const int rank_;
  const int peer_;
  Message message_;  // guarded by group_->mutex
};

class ReceiveTransfer : public Transfer {
 public:
  ReceiveTransfer(std::shared_ptr<Group> group, int rank, int peer, uint32_t tag, std::byte* data,
                  int64_t bytes)
      : group_(std::move(group)), rank_(rank), peer_(peer), tag_(tag), data_(data), bytes_(bytes) {}

  absl::Status Wait(absl::Time deadline) override {
    std::unique_lock<std::mutex> lock(group_->mutex);
    std::deque<Message*>& queue = group_->Queue(peer_, rank_);
    auto found = queue.end();
    const bool in_time = group_->WaitFor(lock, deadline, [&] {
      found = std::find_if(queue.begin(), queue.end(),
                           [this](const Message* message) { return message->tag == tag_; });
      return found != queue.end() || group_->closed[peer_] || group_->interrupted[rank_];
    });
    if (group_->interrupted[rank_]) return Interrupted();
    if (found == queue.end()) return in_time ? Gone(peer_) : Late(peer_);
    Message* message = *found;
    if (message->bytes != bytes_) {
      return PeerError(
          absl::StatusCode::kInternal, {peer_},
          absl::StrCat("peer ", peer_, " sent ", message->bytes, " bytes, not ", bytes_));
    }
    queue.erase(found);
    message->state = Message::State::kCopying;
    lock.unlock();
    std::memcpy(data_, message->data, bytes_);
    lock.lock();
    message->state = Message::State::kDone;
    group_->changed.notify_all();
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<Group> group_;
  const int rank_;
  const int peer_;
  const uint32_t tag_;
  std::byte* const data_;
  const int64_t bytes_;
};

class ThreadTransport : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Group> group, int rank) : group_(std::move(group)), rank_(rank) {}
  ~ThreadTransport() override { Mark(group_->closed); }

  absl::StatusOr<std::unique_ptr<Transfer>> Send(int peer, uint32_t tag, const std::byte* data,
                                                 int64_t bytes) override {
    return std::make_unique<SendTransfer>(group_, rank_, peer, tag, data, bytes);
  }
  absl::StatusOr<std::unique_ptr<Transfer>> Receive(int peer, uint32_t tag, std::byte* data,
                                                    int64_t bytes) override {
    return std::make_unique<ReceiveTransfer>(group_, rank_, peer, tag, data, bytes);
  }
  void Interrupt() override { Mark(group_->interrupted); }
  void Close() override { Mark(group_->closed); }

 private:
  void Mark(std::vector<char>& flags) {
    std::lock_guard<std::mutex> lock(group_->mutex);
    flags[rank_] = 1;
    group_->changed.notify_all();
  }

  const std::shared_ptr<Group> group_;
  const int rank_;
};

}  // namespace

class ThreadWorld::Factory : public CommunicatorFactory {
 public:
  explicit Factory(FaultHook hook) : hook_(std::move(hook)) {}

  absl::StatusOr<std::unique_ptr<Communicator>> Create(const GroupSpec& spec) override {
    RETURN_IF_ERROR(CheckGroupSpec(spec));
    const absl::Time deadline = absl::Now() + spec.setup_timeout;
    std::shared_ptr<Group> group;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      std::shared_ptr<Group>& known = groups_[spec.name];
      if (known == nullptr) known = std::make_shared<Group>(spec.size);
      group = known;
    }
    if (group->size != spec.size) {
      return absl::InvalidArgumentError(absl::StrCat("group \"", spec.name, "\" has ", group->size,
                                                     " ranks for others, ", spec.size, " for rank ",
                                                     spec.rank));
    }
    RETURN_IF_ERROR(Join(*group, spec, deadline));
    HostCommunicator::Hook hook;
    if (hook_) {
      hook = [world_hook = hook_, spec](const CollectiveOp& op) { return world_hook(spec, op); };
    }
    return std::make_unique<HostCommunicator>(
        spec, std::make_unique<ThreadTransport>(group, spec.rank), std::move(hook));
  }

 private:
  static absl::Status Join(Group& group, const GroupSpec& spec, absl::Time deadline) {
    std::unique_lock<std::mutex> lock(group.mutex);
    if (group.joined[spec.rank]) {
      return absl::AlreadyExistsError(
          absl::StrCat("group \"", spec.name, "\" has a rank ", spec.rank, " already"));
    }
    group.joined[spec.rank] = 1;
    group.changed.notify_all();
    const auto missing = [&group] {
      std::vector<int> ranks;
      for (int rank = 0; rank < group.size; ++rank) {
        if (!group.joined[rank]) ranks.push_back(rank);
      }
      return ranks;
    };
    if (group.WaitFor(lock, deadline, [&] { return missing().empty(); })) return absl::OkStatus();
    return PeerError(
        absl::StatusCode::kDeadlineExceeded, missing(),
        absl::StrCat("rank ", spec.rank, " of group \"", spec.name, "\" (", spec.size,
                     " ranks), setup: rank ", absl::StrJoin(missing(), ", "),
                     " did not come within ", absl::FormatDuration(spec.setup_timeout)));
  }

  const FaultHook hook_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Group>> groups_;  // guarded by mutex_
};

ThreadWorld::ThreadWorld(FaultHook hook) : factory_(std::make_unique<Factory>(std::move(hook))) {}
ThreadWorld::~ThreadWorld() = default;
CommunicatorFactory& ThreadWorld::factory() { return *factory_; }

}  // namespace dlo
