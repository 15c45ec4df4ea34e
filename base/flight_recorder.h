// What a rank did last, in memory that outlives it.
//
//   ASSIGN_OR_RETURN(FlightMemory memory, FlightMemory::Create());     // the frontend; memory.fd()
//   ASSIGN_OR_RETURN(auto recorder, FlightRecorder::Open(fd));         // the worker, inherited
//   const FlightToken token = recorder->Begin(FlightOp::kStep);
//   recorder->End(token, /*ok=*/true);
//   FlightLog log = memory.Read();                                     // also after a SIGKILL
//
// The last 4,096 operations of one process, 64 bytes each, oldest overwritten. The memory is a
// memfd: it has no name that could be left behind, and is sealed against a change of its size.
//
// Begin and End take no lock, allocate nothing and may come from any number of threads. A record
// carries its number and a checksum over what Begin wrote, so that a reader knows one that was
// being written when the process died; End is a single store. The reader trusts nothing in the
// memory.
//
// The place of the rank (wave, stage, step, visit) is set once and copied into each record.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace dlo {

inline constexpr int64_t kFlightRecordsMax = 4096;

enum class FlightOp : uint8_t {
  kNone,
  kLoad,   // the model
  kWave,   // an assignment, from its arrival to its answer
  kStage,  // of a request
  kStep,   // of denoising
  kVisit,  // of a streamed block
  kSend,   // the result
  // Of a communicator, in the order of CollectiveOp::Kind.
  kAllGather,
  kAllToAll,
  kAllReduceSum,
  kBroadcast,
  kSendRecv,
  kBarrier,
  kAllocateBuffer,
};
absl::string_view FlightOpName(FlightOp op);
inline bool IsCollective(FlightOp op) { return op >= FlightOp::kAllGather; }

enum class FlightStage : uint8_t { kNone, kText, kDenoise, kDecode, kSend };
absl::string_view FlightStageName(FlightStage stage);

enum class FlightState : uint8_t { kBegun, kDone, kFailed };

// Where a rank is. Steps and visits count from 1 and are 0 before the first.
struct FlightPlace {
  uint64_t wave = 0;
  FlightStage stage = FlightStage::kNone;
  int32_t step = 0;
  int64_t visit = 0;  // within the wave
  bool operator==(const FlightPlace&) const = default;
};

struct FlightRecord {
  uint64_t sequence = 0;  // of all operations of the process, from 1
  absl::Time begin;
  FlightPlace place;
  FlightOp op = FlightOp::kNone;
  FlightState state = FlightState::kBegun;
  absl::Duration duration;      // once it has ended
  std::string group;            // of a collective, e.g. "weights/0"
  uint64_t group_sequence = 0;  // counts the operations of the group, the same on all its ranks
  int peer = -1;                // within the group, where there is one

  // "visit 37", "AllGather #412 of weights/0".
  std::string OpText() const;
  // With time, place and outcome; without the end of the line.
  std::string Line() const;
};

// "wave 3, denoise, step 2, visit 37".
std::string PlaceText(const FlightPlace& place);

struct FlightLog {
  std::vector<FlightRecord> records;  // by sequence
  uint64_t begun = 0;                 // operations in all
  int torn = 0;                       // of the last ones: those that were being written
};

// One line for each of the last `records_max` records.
std::string FlightLogText(const FlightLog& log, size_t records_max);

struct FlightToken {
  uint64_t sequence = 0;  // 0: none
  int64_t begin_ns = 0;
};

class FlightRecorder {
 public:
  // Takes over `fd`, of a FlightMemory. INVALID_ARGUMENT if it is none.
  static absl::StatusOr<std::unique_ptr<FlightRecorder>> Open(int fd);
  // In a file, which is made anew. For a rank whose frontend is on another host.
  static absl::StatusOr<std::unique_ptr<FlightRecorder>> OpenFile(const std::string& path);
  // For nobody to read but this process. Where there is no memory, for nobody at all.
  static std::unique_ptr<FlightRecorder> Private();
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  // A group of ranks by its name, of which 31 bytes are kept; at most 32, further ones share the
  // last. Not on a hot path.
  int AddGroup(absl::string_view name);

  FlightToken Begin(FlightOp op, int group = -1, uint64_t group_sequence = 0, int peer = -1);
  // Once for each token; of an operation that was overwritten meanwhile nothing is noted.
  void End(const FlightToken& token, bool ok);

  // A new wave begins with no stage, step or visit; 0: none.
  void SetWave(uint64_t wave);
  void SetStage(FlightStage stage) { stage_ = stage; }
  void SetStep(int32_t step) { step_ = step; }
  void SetVisit(int64_t visit) { visit_ = visit; }
  FlightPlace place() const;

  FlightLog Read() const;

 private:
  explicit FlightRecorder(void* memory) : memory_(memory) {}

  void* const memory_;  // null: nothing is kept
  std::atomic<int> groups_ = 0;
  std::atomic<uint64_t> wave_ = 0;
  std::atomic<FlightStage> stage_ = FlightStage::kNone;
  std::atomic<int32_t> step_ = 0;
  std::atomic<int64_t> visit_ = 0;
};

// The memory of one recorder, as its reader holds it. Move-only.
class FlightMemory {
 public:
  static absl::StatusOr<FlightMemory> Create();
  FlightMemory(FlightMemory&& other) noexcept;
  FlightMemory& operator=(FlightMemory&& other) noexcept;
  ~FlightMemory();

  int fd() const { return fd_; }  // close-on-exec; stays this object's
  FlightLog Read() const;

 private:
  FlightMemory(int fd, const void* memory) : fd_(fd), memory_(memory) {}
  void Release();

  int fd_ = -1;
  const void* memory_ = nullptr;
};

// A file of FlightRecorder::OpenFile. NOT_FOUND, or INVALID_ARGUMENT if it is none.
absl::StatusOr<FlightLog> ReadFlightFile(const std::string& path);

// Begin and End of the place that it stands in. A null recorder records nothing.
class FlightScope {
 public:
  FlightScope(FlightRecorder* recorder, FlightOp op) : recorder_(recorder) {
    if (recorder_ != nullptr) token_ = recorder_->Begin(op);
  }
  ~FlightScope() {
    if (recorder_ != nullptr) recorder_->End(token_, ok_);
  }
  FlightScope(const FlightScope&) = delete;
  FlightScope& operator=(const FlightScope&) = delete;
  void Fail() { ok_ = false; }

 private:
  FlightRecorder* const recorder_;
  FlightToken token_;
  bool ok_ = true;
};

}  // namespace dlo
