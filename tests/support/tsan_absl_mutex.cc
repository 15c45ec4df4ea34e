// Makes ThreadSanitizer see Abseil's mutexes and notifications, and with them gRPC's.
//
// Debian's Abseil and gRPC are built without it, so that what their locks order looks like a race.
// Linked into a program, these functions take the place of those in libabsl_synchronization.so, for
// every library of the process: they tell the sanitizer what a lock and an unlock order, and call
// the originals. Conditions of Await are evaluated by whichever thread unlocks, under the lock but
// after it was told of the unlock; their reads are not looked at.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
}

namespace {

void* Original(const char* symbol) {
  void* found = dlsym(RTLD_NEXT, symbol);
  if (found == nullptr) {
    fprintf(stderr, "tsan_absl_mutex: no %s in Abseil's library\n", symbol);
    abort();
  }
  return found;
}

class IgnoreReads {
 public:
  IgnoreReads() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~IgnoreReads() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
};

}  // namespace

// A member function's first argument is the object.
#define DLO_ORIGINAL(Result, symbol, ...)        \
  static Result (*const original)(__VA_ARGS__) = \
      reinterpret_cast<Result (*)(__VA_ARGS__)>(Original(symbol))

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  DLO_ORIGINAL(void, "_ZN4absl7debian35Mutex4LockEv", Mutex*);
  original(this);
  __tsan_acquire(this);
}

void Mutex::Unlock() {
  DLO_ORIGINAL(void, "_ZN4absl7debian35Mutex6UnlockEv", Mutex*);
  __tsan_release(this);
  const IgnoreReads ignore;
  original(this);
}

bool Mutex::TryLock() {
  DLO_ORIGINAL(bool, "_ZN4absl7debian35Mutex7TryLockEv", Mutex*);
  const bool locked = original(this);
  if (locked) __tsan_acquire(this);
  return locked;
}

void Mutex::ReaderLock() {
  DLO_ORIGINAL(void, "_ZN4absl7debian35Mutex10ReaderLockEv", Mutex*);
  original(this);
  __tsan_acquire(this);
}

void Mutex::ReaderUnlock() {
  DLO_ORIGINAL(void, "_ZN4absl7debian35Mutex12ReaderUnlockEv", Mutex*);
  __tsan_release(this);
  const IgnoreReads ignore;
  original(this);
}

void Mutex::LockWhen(const Condition& condition) {
  DLO_ORIGINAL(void, "_ZN4absl7debian35Mutex8LockWhenERKNS0_9ConditionE", Mutex*, const Condition*);
  {
    const IgnoreReads ignore;
    original(this, &condition);
  }
  __tsan_acquire(this);
}

void Mutex::Await(const Condition& condition) {
  DLO_ORIGINAL(void, "_ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE", Mutex*, const Condition*);
  __tsan_release(this);
  {
    const IgnoreReads ignore;
    original(this, &condition);
  }
  __tsan_acquire(this);
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  DLO_ORIGINAL(bool, "_ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE",
               Mutex*, const Condition*, Duration);
  __tsan_release(this);
  bool met;
  {
    const IgnoreReads ignore;
    met = original(this, &condition, timeout);
  }
  __tsan_acquire(this);
  return met;
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  DLO_ORIGINAL(bool, "_ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE",
               Mutex*, const Condition*, Time);
  __tsan_release(this);
  bool met;
  {
    const IgnoreReads ignore;
    met = original(this, &condition, deadline);
  }
  __tsan_acquire(this);
  return met;
}

void CondVar::Wait(Mutex* mutex) {
  DLO_ORIGINAL(void, "_ZN4absl7debian37CondVar4WaitEPNS0_5MutexE", CondVar*, Mutex*);
  __tsan_release(mutex);
  original(this, mutex);
  __tsan_acquire(mutex);
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  DLO_ORIGINAL(bool, "_ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE",
               CondVar*, Mutex*, Duration);
  __tsan_release(mutex);
  const bool timed_out = original(this, mutex, timeout);
  __tsan_acquire(mutex);
  return timed_out;
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  DLO_ORIGINAL(bool, "_ZN4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE", CondVar*,
               Mutex*, Time);
  __tsan_release(mutex);
  const bool timed_out = original(this, mutex, deadline);
  __tsan_acquire(mutex);
  return timed_out;
}

void Notification::Notify() {
  DLO_ORIGINAL(void, "_ZN4absl7debian312Notification6NotifyEv", Notification*);
  __tsan_release(this);
  original(this);
}

void Notification::WaitForNotification() const {
  DLO_ORIGINAL(void, "_ZNK4absl7debian312Notification19WaitForNotificationEv", const Notification*);
  original(this);
  __tsan_acquire(const_cast<Notification*>(this));
}

bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  DLO_ORIGINAL(bool,
               "_ZNK4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE",
               const Notification*, Duration);
  const bool notified = original(this, timeout);
  __tsan_acquire(const_cast<Notification*>(this));
  return notified;
}

bool Notification::WaitForNotificationWithDeadline(Time deadline) const {
  DLO_ORIGINAL(bool, "_ZNK4absl7debian312Notification31WaitForNotificationWithDeadlineENS0_4TimeE",
               const Notification*, Time);
  const bool notified = original(this, deadline);
  __tsan_acquire(const_cast<Notification*>(this));
  return notified;
}

ABSL_NAMESPACE_END
}  // namespace absl
