#include "base/flight_recorder.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dlo {
namespace {

constexpr uint64_t kMagic = 0x31'74'68'67'69'6c'66'64;  // "dflight1", little-endian
constexpr int kGroupsMax = 32;
constexpr int kGroupBytes = 32;

using Word = std::atomic<uint64_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 8);

// Words of a record. All but the outcome are covered by the checksum.
enum : size_t {
  kSequence,
  kTime,  // ns since 1970
  kWave,
  kVisit,
  kWhat,     // op 8, stage 8, peer + 1 16, step 32 bits
  kGroup,    // group + 1 8, its sequence 56 bits
  kOutcome,  // sequence 24, state 8, duration in us 32 bits
  kChecksum,
  kWords
};
struct Slot {
  std::array<Word, kWords> words;
};
static_assert(sizeof(Slot) == 64);

struct Memory {
  Word magic;
  Word begun;
  std::array<std::array<std::atomic<char>, kGroupBytes>, kGroupsMax> groups;
  std::array<char, 4096 - 16 - kGroupsMax * kGroupBytes> unused;
  std::array<Slot, kFlightRecordsMax> slots;
};
static_assert(sizeof(Memory) == 4096 + kFlightRecordsMax * 64);

uint64_t Checksum(const std::array<uint64_t, kWords>& words) {
  uint64_t hash = kMagic;
  for (size_t i = 0; i < kOutcome; ++i) {
    // The finalizer of MurmurHash3 after each word.
    hash ^= words[i];
    hash = (hash ^ (hash >> 33)) * 0xff51afd7ed558ccd;
    hash = (hash ^ (hash >> 33)) * 0xc4ceb9fe1a85ec53;
    hash ^= hash >> 33;
  }
  return hash;
}

constexpr uint64_t Outcome(uint64_t sequence, FlightState state, uint64_t duration_us) {
  return (sequence & 0xffffff) << 40 | static_cast<uint64_t>(state) << 32 |
         std::min<uint64_t>(duration_us, 0xffffffff);
}

int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

Slot& SlotOf(Memory& memory, uint64_t sequence) {
  return memory.slots[sequence % kFlightRecordsMax];
}

std::string GroupName(const Memory& memory, uint64_t group) {
  std::string name;
  if (group >= kGroupsMax) return name;
  for (const std::atomic<char>& c : memory.groups[group]) {
    const char byte = c.load(std::memory_order_relaxed);
    if (byte == 0) break;
    // Names are printed.
    name.push_back(byte >= ' ' && byte <= '~' ? byte : '?');
  }
  return name;
}

FlightLog ReadMemory(const Memory& memory) {
  FlightLog log;
  if (memory.magic.load(std::memory_order_acquire) != kMagic) return log;
  log.begun = memory.begun.load(std::memory_order_acquire);
  for (const Slot& slot : memory.slots) {
    std::array<uint64_t, kWords> words;
    for (size_t i = 0; i < kWords; ++i) words[i] = slot.words[i].load(std::memory_order_relaxed);
    const uint64_t sequence = words[kSequence];
    if (sequence == 0 ||
        &slot - memory.slots.data() != static_cast<ptrdiff_t>(sequence % kFlightRecordsMax)) {
      continue;
    }
    if (words[kChecksum] != Checksum(words) || words[kOutcome] >> 40 != (sequence & 0xffffff)) {
      continue;
    }
    FlightRecord& record = log.records.emplace_back();
    record.sequence = sequence;
    record.begin = absl::FromUnixNanos(static_cast<int64_t>(words[kTime]));
    record.op = static_cast<FlightOp>(words[kWhat] >> 56);
    record.place = {.wave = words[kWave],
                    .stage = static_cast<FlightStage>(words[kWhat] >> 48 & 0xff),
                    .step = static_cast<int32_t>(words[kWhat] & 0xffffffff),
                    .visit = static_cast<int64_t>(words[kVisit])};
    record.peer = static_cast<int>(words[kWhat] >> 32 & 0xffff) - 1;
    if (const uint64_t group = words[kGroup] >> 56; group > 0) {
      record.group = GroupName(memory, group - 1);
    }
    record.group_sequence = words[kGroup] & 0xffffffffffffff;
    record.state = static_cast<FlightState>(words[kOutcome] >> 32 & 0xff);
    record.duration = absl::Microseconds(static_cast<int64_t>(words[kOutcome] & 0xffffffff));
  }
  std::sort(log.records.begin(), log.records.end(),
            [](const FlightRecord& a, const FlightRecord& b) { return a.sequence < b.sequence; });
  // A writer that died in the middle leaves its own number without a record.
  const uint64_t kept = std::min<uint64_t>(log.begun, kFlightRecordsMax);
  const auto current = static_cast<uint64_t>(
      std::count_if(log.records.begin(), log.records.end(), [&](const FlightRecord& record) {
        return record.sequence + kept > log.begun && record.sequence <= log.begun;
      }));
  log.torn = static_cast<int>(kept - current);
  return log;
}

absl::StatusOr<void*> Map(int fd, int protection) {
  void* const memory = mmap(nullptr, sizeof(Memory), protection, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return absl::ErrnoToStatus(errno, "cannot map a flight recorder");
  return memory;
}

absl::Status CheckSize(int fd, absl::string_view what) {
  struct stat info;
  if (fstat(fd, &info) != 0) return absl::ErrnoToStatus(errno, what);
  if (info.st_size != static_cast<off_t>(sizeof(Memory))) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is no flight recorder: it has ",
                                                   info.st_size, " bytes, not ", sizeof(Memory)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view FlightOpName(FlightOp op) {
  constexpr std::array<absl::string_view, 14> kNames = {
      "nothing",   "loading",  "wave",      "stage",         "step",
      "visit",     "sending",  "AllGather", "AllToAll",      "AllReduceSum",
      "Broadcast", "SendRecv", "Barrier",   "AllocateBuffer"};
  const auto index = static_cast<size_t>(op);
  return index < kNames.size() ? kNames[index] : "unknown";
}

absl::string_view FlightStageName(FlightStage stage) {
  constexpr std::array<absl::string_view, 5> kNames = {"", "text", "denoise", "decode", "send"};
  const auto index = static_cast<size_t>(stage);
  return index < kNames.size() ? kNames[index] : "unknown stage";
}

std::string FlightRecord::OpText() const {
  switch (op) {
    case FlightOp::kWave:
      return absl::StrCat("wave ", place.wave);
    case FlightOp::kStage:
      return absl::StrCat("stage ", FlightStageName(place.stage));
    case FlightOp::kStep:
      return absl::StrCat("step ", place.step);
    case FlightOp::kVisit:
      return absl::StrCat("visit ", place.visit);
    default:
      break;
  }
  std::string text(FlightOpName(op));
  if (!IsCollective(op)) return text;
  absl::StrAppend(&text, " #", group_sequence, " of ", group.empty() ? "a group" : group);
  if (peer >= 0) absl::StrAppend(&text, " with peer ", peer);
  return text;
}

std::string PlaceText(const FlightPlace& place) {
  if (place.wave == 0) return "no wave";
  std::string text = absl::StrCat("wave ", place.wave);
  if (place.stage != FlightStage::kNone) {
    absl::StrAppend(&text, ", ", FlightStageName(place.stage));
  }
  if (place.step > 0) absl::StrAppend(&text, ", step ", place.step);
  if (place.visit > 0) absl::StrAppend(&text, ", visit ", place.visit);
  return text;
}

std::string FlightRecord::Line() const {
  std::string outcome = "unfinished";
  if (state != FlightState::kBegun) {
    outcome = absl::StrCat(state == FlightState::kDone ? "done" : "failed", " after ",
                           absl::FormatDuration(duration));
  }
  return absl::StrCat(absl::FormatTime("%H:%M:%E6S", begin, absl::UTCTimeZone()), " #", sequence,
                      "  ", OpText(), "  (", PlaceText(place), ")  ", outcome);
}

std::string FlightLogText(const FlightLog& log, size_t records_max) {
  std::string text;
  const size_t first = log.records.size() - std::min(log.records.size(), records_max);
  for (size_t i = first; i < log.records.size(); ++i) {
    absl::StrAppend(&text, log.records[i].Line(), "\n");
  }
  return text;
}

absl::StatusOr<std::unique_ptr<FlightRecorder>> FlightRecorder::Open(int fd) {
  const absl::Status status = CheckSize(fd, absl::StrCat("descriptor ", fd));
  absl::StatusOr<void*> memory = nullptr;
  if (status.ok()) {
    memory = Map(fd, PROT_READ | PROT_WRITE);
  } else {
    memory = status;
  }
  close(fd);
  if (!memory.ok()) return memory.status();
  static_cast<Memory*>(*memory)->magic.store(kMagic, std::memory_order_release);
  return std::unique_ptr<FlightRecorder>(new FlightRecorder(*memory));
}

absl::StatusOr<std::unique_ptr<FlightRecorder>> FlightRecorder::OpenFile(const std::string& path) {
  // Never into a file that something else is in.
  const int fd = open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
  struct stat info;
  if (fstat(fd, &info) == 0 && info.st_size != 0) {
    if (const absl::Status status = CheckSize(fd, path); !status.ok()) {
      close(fd);
      return status;
    }
  }
  if (ftruncate(fd, 0) != 0 || posix_fallocate(fd, 0, sizeof(Memory)) != 0) {
    const absl::Status status = absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
    close(fd);
    return status;
  }
  return Open(fd);
}

std::unique_ptr<FlightRecorder> FlightRecorder::Private() {
  void* memory =
      mmap(nullptr, sizeof(Memory), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) memory = nullptr;
  if (memory != nullptr) static_cast<Memory*>(memory)->magic = kMagic;
  return std::unique_ptr<FlightRecorder>(new FlightRecorder(memory));
}

FlightRecorder::~FlightRecorder() {
  if (memory_ != nullptr) munmap(memory_, sizeof(Memory));
}

int FlightRecorder::AddGroup(absl::string_view name) {
  const int group = std::min(groups_.fetch_add(1), kGroupsMax - 1);
  if (memory_ == nullptr) return group;
  auto& kept = static_cast<Memory*>(memory_)->groups[group];
  for (size_t i = 0; i < kept.size(); ++i) {
    const bool inside = i < name.size() && i + 1 < kept.size();
    kept[i].store(inside ? name[i] : '\0', std::memory_order_relaxed);
  }
  return group;
}

FlightToken FlightRecorder::Begin(FlightOp op, int group, uint64_t group_sequence, int peer) {
  FlightToken token{.begin_ns = NowNs()};
  if (memory_ == nullptr) return token;
  auto& memory = *static_cast<Memory*>(memory_);
  token.sequence = memory.begun.fetch_add(1, std::memory_order_acq_rel) + 1;
  const FlightPlace at = place();
  std::array<uint64_t, kWords> words = {};
  words[kSequence] = token.sequence;
  words[kTime] = static_cast<uint64_t>(token.begin_ns);
  words[kWave] = at.wave;
  words[kVisit] = static_cast<uint64_t>(at.visit);
  words[kWhat] = static_cast<uint64_t>(op) << 56 | static_cast<uint64_t>(at.stage) << 48 |
                 static_cast<uint64_t>((peer + 1) & 0xffff) << 32 | static_cast<uint32_t>(at.step);
  words[kGroup] =
      static_cast<uint64_t>((group + 1) & 0xff) << 56 | (group_sequence & 0xffffffffffffff);
  words[kOutcome] = Outcome(token.sequence, FlightState::kBegun, 0);
  words[kChecksum] = Checksum(words);
  Slot& slot = SlotOf(memory, token.sequence);
  for (size_t i = 0; i < kWords; ++i) slot.words[i].store(words[i], std::memory_order_relaxed);
  return token;
}

void FlightRecorder::End(const FlightToken& token, bool ok) {
  if (memory_ == nullptr || token.sequence == 0) return;
  const int64_t us = std::max<int64_t>(0, NowNs() - token.begin_ns) / 1000;
  // Fails if the slot is a later operation's by now.
  uint64_t expected = Outcome(token.sequence, FlightState::kBegun, 0);
  SlotOf(*static_cast<Memory*>(memory_), token.sequence)
      .words[kOutcome]
      .compare_exchange_strong(
          expected,
          Outcome(token.sequence, ok ? FlightState::kDone : FlightState::kFailed,
                  static_cast<uint64_t>(us)),
          std::memory_order_release, std::memory_order_relaxed);
}

void FlightRecorder::SetWave(uint64_t wave) {
  wave_ = wave;
  stage_ = FlightStage::kNone;
  step_ = 0;
  visit_ = 0;
}

FlightPlace FlightRecorder::place() const {
  return {.wave = wave_, .stage = stage_, .step = step_, .visit = visit_};
}

FlightLog FlightRecorder::Read() const {
  return memory_ == nullptr ? FlightLog() : ReadMemory(*static_cast<const Memory*>(memory_));
}

absl::StatusOr<FlightMemory> FlightMemory::Create() {
  const int fd = memfd_create("dlo-flight", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return absl::ErrnoToStatus(errno, "memfd_create");
  // A reader that maps what the writer could shrink would die of it.
  if (ftruncate(fd, sizeof(Memory)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const absl::Status status = absl::ErrnoToStatus(errno, "a flight recorder's memory");
    close(fd);
    return status;
  }
  const absl::StatusOr<void*> memory = Map(fd, PROT_READ);
  if (!memory.ok()) {
    close(fd);
    return memory.status();
  }
  return FlightMemory(fd, *memory);
}

FlightMemory::FlightMemory(FlightMemory&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), memory_(std::exchange(other.memory_, nullptr)) {}

FlightMemory& FlightMemory::operator=(FlightMemory&& other) noexcept {
  if (this != &other) {
    Release();
    fd_ = std::exchange(other.fd_, -1);
    memory_ = std::exchange(other.memory_, nullptr);
  }
  return *this;
}

FlightMemory::~FlightMemory() { Release(); }

void FlightMemory::Release() {
  if (memory_ != nullptr) munmap(const_cast<void*>(memory_), sizeof(Memory));
  if (fd_ >= 0) close(fd_);
}

FlightLog FlightMemory::Read() const { return ReadMemory(*static_cast<const Memory*>(memory_)); }

absl::StatusOr<FlightLog> ReadFlightFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot read ", path));
  if (const absl::Status status = CheckSize(fd, path); !status.ok()) {
    close(fd);
    return status;
  }
  const absl::StatusOr<void*> memory = Map(fd, PROT_READ);
  close(fd);
  if (!memory.ok()) return memory.status();
  const auto* mapped = static_cast<const Memory*>(*memory);
  absl::StatusOr<FlightLog> log =
      absl::InvalidArgumentError(absl::StrCat(path, " is no flight recorder"));
  if (mapped->magic.load() == kMagic) log = ReadMemory(*mapped);
  munmap(*memory, sizeof(Memory));
  return log;
}

}  // namespace dlo
