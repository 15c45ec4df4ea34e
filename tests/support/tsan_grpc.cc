// Makes ThreadSanitizer see what gRPC orders between threads.
//
// Debian's gRPC is built without it: what one thread gives to gRPC by starting operations of a
// call, and another thread is called back with or receives as a message, looks like a race. Linked
// into a program, these functions take the place of libgrpc.so's for libgrpc++.so too. They tell
// the sanitizer that all before the start of any operation, and in any callback, happens before
// what follows the end of any later one, in this process: more than gRPC promises, since which
// message is the answer to which is not known here. So a race between two callbacks is seen only
// where they overlap.
#include <dlfcn.h>
#include <grpc/grpc.h>
#include <stdio.h>
#include <stdlib.h>

extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}

namespace {

char messages;  // its address stands for all that gRPC carries

void* Original(const char* symbol) {
  void* found = dlsym(RTLD_NEXT, symbol);
  if (found == nullptr) {
    fprintf(stderr, "tsan_grpc: no %s in gRPC's libraries\n", symbol);
    abort();
  }
  return found;
}

#define DLO_ORIGINAL(function) \
  static const auto original = reinterpret_cast<decltype(&(function))>(Original(#function))

using Run = void (*)(grpc_completion_queue_functor* functor, int ok);

// How callbacks of servers and of clients' streams are run: grpcpp/support/callback_common.h. The
// program may have one of its own.
constexpr char kRun[] =
    "_ZN4grpc8internal22CallbackWithSuccessTag9StaticRunEP29grpc_completion_queue_functori";

Run LibrarysRun() {
  static const Run run = reinterpret_cast<Run>(Original(kRun));
  return run;
}

Run ProgramsRun() {
  static const Run run = reinterpret_cast<Run>(dlsym(RTLD_DEFAULT, kRun));
  return run;
}

void RunInOrder(grpc_completion_queue_functor* functor, int ok) {
  __tsan_acquire(&messages);
  LibrarysRun()(functor, ok);
  __tsan_release(&messages);
}

}  // namespace

extern "C" {

// Of every program that this is linked into: workers end without joining their threads.
const char* __tsan_default_options() { return "report_thread_leaks=0"; }

// What libraries that are not built for the sanitizer hand between their own threads by atomics is
// not seen: what the C library does for them (malloc, memcpy, sendmsg, close) is not looked at. All
// accesses of our code are, but in and after OnDone of a call that has ended and around
// interceptors. fopen64: of a descriptor whose number gRPC had.
const char* __tsan_default_suppressions() {
  return "called_from_lib:libabsl_cord.so\n"
         "called_from_lib:libabsl_graphcycles_internal.so\n"
         "called_from_lib:libabsl_status.so\n"
         "called_from_lib:libabsl_strings.so\n"
         "called_from_lib:libabsl_time.so\n"
         "called_from_lib:libabsl_time_zone.so\n"
         "called_from_lib:libcrypto.so\n"
         "called_from_lib:libgpr.so\n"
         "called_from_lib:libgrpc++.so\n"
         "called_from_lib:libgrpc.so\n"
         "called_from_lib:libssl.so\n"
         "called_from_lib:libupb.so\n"
         "race:CallOnDone\n"
         "race:InterceptorBatchMethods\n"
         "race:fopen64\n";
}

grpc_call_error grpc_call_start_batch(grpc_call* call, const grpc_op* ops, size_t nops, void* tag,
                                      void* reserved) {
  DLO_ORIGINAL(grpc_call_start_batch);
  // A tag of another kind begins with the address of its virtual functions, never with one of
  // these.
  auto* const functor = static_cast<grpc_completion_queue_functor*>(tag);
  if (functor != nullptr &&
      (functor->functor_run == LibrarysRun() || functor->functor_run == ProgramsRun())) {
    functor->functor_run = RunInOrder;
  }
  __tsan_release(&messages);
  return original(call, ops, nops, tag, reserved);
}

grpc_event grpc_completion_queue_pluck(grpc_completion_queue* queue, void* tag,
                                       gpr_timespec deadline, void* reserved) {
  DLO_ORIGINAL(grpc_completion_queue_pluck);
  const grpc_event event = original(queue, tag, deadline, reserved);
  __tsan_acquire(&messages);
  return event;
}

grpc_event grpc_completion_queue_next(grpc_completion_queue* queue, gpr_timespec deadline,
                                      void* reserved) {
  DLO_ORIGINAL(grpc_completion_queue_next);
  const grpc_event event = original(queue, deadline, reserved);
  __tsan_acquire(&messages);
  return event;
}

// The first that a server's handler of a new call does.
void grpc_call_ref(grpc_call* call) {
  DLO_ORIGINAL(grpc_call_ref);
  __tsan_acquire(&messages);
  original(call);
}

}  // extern "C"
