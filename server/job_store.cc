#include "server/job_store.h"

#include <fcntl.h>
#include <sqlite3.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"

namespace dlo {
namespace {

constexpr char kDatabaseName[] = "jobs.db";
constexpr char kResultsName[] = "results";
constexpr char kLockName[] = "lock";
constexpr char kResultSuffix[] = ".result";
constexpr char kTimelineSuffix[] = ".timeline";
constexpr int kFormat = 1;  // user_version of the database
// Somebody who looks into the database with the sqlite3 tool.
constexpr int kBusyTimeoutMs = 5000;

constexpr char kSchema[] = R"sql(
  CREATE TABLE jobs (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    state INTEGER NOT NULL,
    expire_us INTEGER,
    deadline_us INTEGER,
    result_bytes INTEGER NOT NULL,
    request BLOB NOT NULL,
    job BLOB NOT NULL);
  CREATE INDEX jobs_by_state ON jobs (state, sequence);
  CREATE INDEX jobs_by_expiry ON jobs (expire_us, sequence);
  -- What the ended jobs take: results and records.
  CREATE TABLE total (bytes INTEGER NOT NULL);
  INSERT INTO total VALUES (0);
  CREATE TRIGGER job_ended AFTER UPDATE ON jobs BEGIN
    UPDATE total SET bytes = bytes
      + iif(new.expire_us IS NULL, 0, new.result_bytes + length(new.request) + length(new.job))
      - iif(old.expire_us IS NULL, 0, old.result_bytes + length(old.request) + length(old.job));
  END;
  CREATE TRIGGER job_removed AFTER DELETE ON jobs WHEN old.expire_us IS NOT NULL BEGIN
    UPDATE total SET bytes = bytes - old.result_bytes - length(old.request) - length(old.job);
  END;
)sql";

#define DLO_JOB_COLUMNS "sequence, id, state, expire_us, deadline_us, result_bytes, request, job"

absl::Status FolderError(const std::filesystem::path& path, const std::string& why) {
  return absl::FailedPreconditionError(
      absl::StrCat("data_dir: ", path.string(), ": ", why, "; set another one with --data-dir"));
}

}  // namespace

// The folder is this process's while this lives.
class JobStore::LockFile {
 public:
  static absl::StatusOr<std::unique_ptr<LockFile>> Take(const std::filesystem::path& folder) {
    const std::filesystem::path path = folder / kLockName;
    const int fd = open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) return FolderError(path, strerror(errno));
    std::unique_ptr<LockFile> lock(new LockFile(fd));
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
      std::array<char, 32> owner{};
      [[maybe_unused]] const ssize_t got = pread(fd, owner.data(), owner.size() - 1, 0);
      return absl::UnavailableError(absl::StrCat(
          "data_dir ", folder.string(), " is in use by another dlo-serve (process ", owner.data(),
          "); stop that one or give this one a folder of its own with --data-dir"));
    }
    const std::string pid = absl::StrCat(getpid());
    if (ftruncate(fd, 0) != 0 || pwrite(fd, pid.data(), pid.size(), 0) < 0) {
      return FolderError(path, strerror(errno));
    }
    return lock;
  }
  ~LockFile() { close(fd_); }

 private:
  explicit LockFile(int fd) : fd_(fd) {}
  const int fd_;
};

// Goes back to the store for its next use.
class JobStore::Statement {
 public:
  Statement(JobStore* store, std::string sql, sqlite3_stmt* statement)
      : store_(store), sql_(std::move(sql)), statement_(statement) {}
  Statement(Statement&& other) noexcept
      : store_(other.store_),
        sql_(std::move(other.sql_)),
        statement_(std::exchange(other.statement_, nullptr)) {}
  ~Statement() {
    if (statement_ == nullptr) return;
    sqlite3_reset(statement_);
    sqlite3_clear_bindings(statement_);
    store_->statements_.emplace(std::move(sql_), statement_);
  }

  Statement& Bind(int64_t value) {
    sqlite3_bind_int64(statement_, ++bound_, value);
    return *this;
  }
  Statement& Bind(const std::optional<absl::Time>& time) {
    if (time) return Bind(absl::ToUnixMicros(*time));
    sqlite3_bind_null(statement_, ++bound_);
    return *this;
  }
  Statement& BindText(const std::string& text) {
    sqlite3_bind_text(statement_, ++bound_, text.data(), static_cast<int>(text.size()),
                      SQLITE_TRANSIENT);
    return *this;
  }
  Statement& BindBlob(const std::string& bytes) {
    // A null pointer would bind NULL.
    sqlite3_bind_blob(statement_, ++bound_, bytes.empty() ? "" : bytes.data(),
                      static_cast<int>(bytes.size()), SQLITE_TRANSIENT);
    return *this;
  }

  // True: there is a row.
  absl::StatusOr<bool> Step() {
    const int code = sqlite3_step(statement_);
    if (code == SQLITE_ROW) return true;
    if (code == SQLITE_DONE) return false;
    return store_->Error(code);
  }

  int64_t Int(int column) const { return sqlite3_column_int64(statement_, column); }
  std::optional<absl::Time> Time(int column) const {
    if (sqlite3_column_type(statement_, column) == SQLITE_NULL) return std::nullopt;
    return absl::FromUnixMicros(Int(column));
  }
  std::string Bytes(int column) const {
    const void* const bytes = sqlite3_column_blob(statement_, column);
    if (bytes == nullptr) return "";
    return std::string(static_cast<const char*>(bytes), sqlite3_column_bytes(statement_, column));
  }

 private:
  JobStore* store_;
  std::string sql_;
  sqlite3_stmt* statement_;
  int bound_ = 0;
};

absl::StatusOr<std::unique_ptr<JobStore>> JobStore::Open(const JobStoreOptions& options) {
  std::error_code error;
  const bool existed = std::filesystem::is_directory(options.folder, error);
  std::filesystem::create_directories(options.folder, error);
  if (error) return FolderError(options.folder, error.message());
  // Prompts are nobody else's business.
  if (!existed) chmod(options.folder.c_str(), 0700);
  ASSIGN_OR_RETURN(std::unique_ptr<LockFile> lock, LockFile::Take(options.folder));
  const std::filesystem::path results = options.folder / kResultsName;
  if (mkdir(results.c_str(), 0700) != 0 && errno != EEXIST) {
    return FolderError(results, strerror(errno));
  }
  std::unique_ptr<JobStore> store(new JobStore(options, std::move(lock)));
  RETURN_IF_ERROR(store->OpenDatabase());
  RETURN_IF_ERROR(store->RemoveOrphans());
  return store;
}

JobStore::JobStore(JobStoreOptions options, std::unique_ptr<LockFile> lock)
    : options_(std::move(options)), lock_(std::move(lock)) {}

JobStore::~JobStore() {
  for (const auto& [sql, statement] : statements_) sqlite3_finalize(statement);
  sqlite3_close(database_);
}

absl::Status JobStore::OpenDatabase() {
  const std::filesystem::path path = options_.folder / kDatabaseName;
  // SQLite gives the files that it makes beside it the same mode.
  const int fd = open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return FolderError(path, strerror(errno));
  close(fd);
  const int code = sqlite3_open_v2(path.c_str(), &database_,
                                   SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, nullptr);
  if (code != SQLITE_OK) return Error(code);
  sqlite3_extended_result_codes(database_, 1);
  sqlite3_busy_timeout(database_, kBusyTimeoutMs);
  RETURN_IF_ERROR(Execute("PRAGMA journal_mode = WAL"));
  RETURN_IF_ERROR(Execute("PRAGMA synchronous = FULL"));
  {
    ASSIGN_OR_RETURN(Statement check, Prepare("PRAGMA quick_check(1)"));
    ASSIGN_OR_RETURN(const bool row, check.Step());
    if (!row || check.Bytes(0) != "ok") return Error(SQLITE_CORRUPT);
  }
  return CheckVersion();
}

absl::Status JobStore::CheckVersion() {
  int64_t format = 0;
  {
    ASSIGN_OR_RETURN(Statement version, Prepare("PRAGMA user_version"));
    ASSIGN_OR_RETURN(const bool row, version.Step());
    if (row) format = version.Int(0);
  }
  if (format == kFormat) return absl::OkStatus();
  if (format != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat((options_.folder / kDatabaseName).string(), " has format ", format,
                     ", this dlo-serve reads ", kFormat,
                     "; run the version that wrote it, or set another folder with --data-dir"));
  }
  RETURN_IF_ERROR(Execute("BEGIN IMMEDIATE"));
  absl::Status made = Execute(kSchema);
  if (made.ok()) made = Execute(absl::StrCat("PRAGMA user_version = ", kFormat).c_str());
  if (made.ok()) made = Execute("COMMIT");
  if (!made.ok()) sqlite3_exec(database_, "ROLLBACK", nullptr, nullptr, nullptr);
  return made;
}

absl::Status JobStore::RemoveOrphans() {
  std::set<std::string> kept;
  {
    ASSIGN_OR_RETURN(
        Statement ended,
        Prepare("SELECT id FROM jobs WHERE expire_us IS NOT NULL AND result_bytes > 0"));
    while (true) {
      ASSIGN_OR_RETURN(const bool row, ended.Step());
      if (!row) break;
      kept.insert(ResultPath(ended.Bytes(0)).filename());
      kept.insert(TimelinePath(ended.Bytes(0)).filename());
    }
  }
  std::error_code error;
  for (std::filesystem::directory_iterator file(options_.folder / kResultsName, error), end;
       !error && file != end; file.increment(error)) {
    const std::string name = file->path().filename();
    const bool ours = absl::EndsWith(name, kResultSuffix) ||
                      absl::EndsWith(name, kTimelineSuffix) || absl::EndsWith(name, kPartialSuffix);
    if (ours && kept.count(name) == 0) unlink(file->path().c_str());
  }
  if (error) return FolderError(options_.folder / kResultsName, error.message());
  return absl::OkStatus();
}

absl::Status JobStore::Execute(const char* sql) {
  const int code = sqlite3_exec(database_, sql, nullptr, nullptr, nullptr);
  return code == SQLITE_OK ? absl::OkStatus() : Error(code);
}

absl::Status JobStore::Error(int code) const {
  const std::string file = (options_.folder / kDatabaseName).string();
  const std::string what = absl::StrCat(file, ": ", sqlite3_errstr(code));
  switch (code & 0xff) {
    case SQLITE_FULL:
      return absl::ResourceExhaustedError(what);
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return absl::DataLossError(
          absl::StrCat(what, "; restore it, or move ", file,
                       "* away to start without the jobs that it holds (their results go, too)"));
    case SQLITE_CONSTRAINT:
      return absl::AlreadyExistsError(what);
    default:
      return absl::InternalError(what);
  }
}

absl::StatusOr<JobStore::Statement> JobStore::Prepare(const std::string& sql) {
  if (auto known = statements_.find(sql); known != statements_.end()) {
    return Statement(this, sql, statements_.extract(known).mapped());
  }
  sqlite3_stmt* statement = nullptr;
  const int code = sqlite3_prepare_v3(database_, sql.c_str(), static_cast<int>(sql.size()),
                                      SQLITE_PREPARE_PERSISTENT, &statement, nullptr);
  if (code != SQLITE_OK) return Error(code);
  return Statement(this, sql, statement);
}

std::vector<absl::Status> JobStore::Transaction(const std::vector<Operation>& operations) {
  std::vector<absl::Status> statuses;
  if (RunInTransaction(operations, &statuses).ok()) return statuses;
  if (operations.size() == 1) return statuses;
  std::vector<absl::Status> single;
  for (size_t i = 0; i < operations.size(); ++i) {
    RunInTransaction({operations[i]}, &single).IgnoreError();
    statuses[i] = single[0];
  }
  return statuses;
}

// The error that undid everything; that an operation changed nothing (NOT_FOUND, ALREADY_EXISTS) is
// none.
absl::Status JobStore::RunInTransaction(const std::vector<Operation>& operations,
                                        std::vector<absl::Status>* statuses) {
  removed_.clear();
  absl::Status failure = Execute("BEGIN IMMEDIATE");
  statuses->assign(operations.size(), failure);
  for (size_t i = 0; failure.ok() && i < operations.size(); ++i) {
    (*statuses)[i] = operations[i](*this);
    if (!absl::IsNotFound((*statuses)[i]) && !absl::IsAlreadyExists((*statuses)[i])) {
      failure = (*statuses)[i];
    }
  }
  if (failure.ok()) failure = Execute("COMMIT");
  if (!failure.ok()) {
    // Fails when the error has ended the transaction already.
    sqlite3_exec(database_, "ROLLBACK", nullptr, nullptr, nullptr);
    statuses->assign(operations.size(), failure);
    return failure;
  }
  for (const std::string& id : removed_) {
    unlink(ResultPath(id).c_str());
    unlink(TimelinePath(id).c_str());
  }
  removed_.clear();
  return absl::OkStatus();
}

absl::Status JobStore::Insert(const JobRecord& record) {
  ASSIGN_OR_RETURN(
      Statement insert,
      Prepare("INSERT INTO jobs (id, state, expire_us, deadline_us, result_bytes, request, job) "
              "VALUES (?, ?, NULL, ?, 0, ?, ?)"));
  insert.BindText(record.id).Bind(record.state).Bind(record.deadline);
  insert.BindBlob(record.request).BindBlob(record.job);
  return insert.Step().status();
}

absl::Status JobStore::Update(const JobRecord& record) {
  ASSIGN_OR_RETURN(
      Statement update,
      Prepare("UPDATE jobs SET state = ?, expire_us = ?, result_bytes = ?, job = ? WHERE id = ?"));
  update.Bind(record.state).Bind(record.expire_time).Bind(record.result_bytes);
  update.BindBlob(record.job).BindText(record.id);
  RETURN_IF_ERROR(update.Step().status());
  if (sqlite3_changes(database_) > 0) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("there is no job \"", record.id, "\""));
}

absl::StatusOr<std::vector<JobRecord>> JobStore::Select(Statement& statement) {
  std::vector<JobRecord> records;
  while (true) {
    ASSIGN_OR_RETURN(const bool row, statement.Step());
    if (!row) return records;
    records.push_back({.sequence = statement.Int(0),
                       .id = statement.Bytes(1),
                       .state = static_cast<int>(statement.Int(2)),
                       .expire_time = statement.Time(3),
                       .deadline = statement.Time(4),
                       .result_bytes = statement.Int(5),
                       .request = statement.Bytes(6),
                       .job = statement.Bytes(7)});
  }
}

absl::StatusOr<std::optional<JobRecord>> JobStore::Find(const std::string& id) {
  ASSIGN_OR_RETURN(Statement find, Prepare("SELECT " DLO_JOB_COLUMNS " FROM jobs WHERE id = ?"));
  find.BindText(id);
  ASSIGN_OR_RETURN(std::vector<JobRecord> records, Select(find));
  if (records.empty()) return std::nullopt;
  return std::move(records[0]);
}

absl::StatusOr<std::vector<JobRecord>> JobStore::Unfinished() {
  ASSIGN_OR_RETURN(
      Statement select,
      Prepare("SELECT " DLO_JOB_COLUMNS " FROM jobs WHERE expire_us IS NULL ORDER BY sequence"));
  return Select(select);
}

absl::StatusOr<std::vector<JobRecord>> JobStore::List(const std::vector<int>& states,
                                                      int64_t before, int limit) {
  if (before == 0) before = INT64_MAX;
  if (states.empty()) {
    ASSIGN_OR_RETURN(Statement select,
                     Prepare("SELECT " DLO_JOB_COLUMNS
                             " FROM jobs WHERE sequence < ? ORDER BY sequence DESC LIMIT ?"));
    select.Bind(before).Bind(limit);
    return Select(select);
  }
  // One walk down the index for each state, however rare it is.
  std::vector<JobRecord> records;
  for (const int state : std::set<int>(states.begin(), states.end())) {
    ASSIGN_OR_RETURN(
        Statement select,
        Prepare("SELECT " DLO_JOB_COLUMNS
                " FROM jobs WHERE state = ? AND sequence < ? ORDER BY sequence DESC LIMIT ?"));
    select.Bind(state).Bind(before).Bind(limit);
    ASSIGN_OR_RETURN(std::vector<JobRecord> more, Select(select));
    std::move(more.begin(), more.end(), std::back_inserter(records));
  }
  std::sort(records.begin(), records.end(),
            [](const JobRecord& a, const JobRecord& b) { return a.sequence > b.sequence; });
  if (records.size() > static_cast<size_t>(limit)) records.resize(limit);
  return records;
}

absl::StatusOr<bool> JobStore::Remove(const std::string& id) {
  ASSIGN_OR_RETURN(Statement remove, Prepare("DELETE FROM jobs WHERE id = ?"));
  remove.BindText(id);
  RETURN_IF_ERROR(remove.Step().status());
  if (sqlite3_changes(database_) == 0) return false;
  removed_.push_back(id);
  return true;
}

absl::StatusOr<int> JobStore::RemoveWhile(const char* sql, int64_t bound) {
  for (int removed = 0;; ++removed) {
    std::string id;
    {
      ASSIGN_OR_RETURN(Statement next, Prepare(sql));
      next.Bind(bound);
      ASSIGN_OR_RETURN(const bool row, next.Step());
      if (!row) return removed;
      id = next.Bytes(0);
    }
    RETURN_IF_ERROR(Remove(id).status());
  }
}

absl::StatusOr<int> JobStore::RemoveExpired(absl::Time now) {
  return RemoveWhile("SELECT id FROM jobs WHERE expire_us <= ? ORDER BY expire_us LIMIT 1",
                     absl::ToUnixMicros(now));
}

absl::StatusOr<int> JobStore::RemoveForRoom() {
  {
    // By itself: in the query below it would be asked for every ended job.
    ASSIGN_OR_RETURN(Statement total, Prepare("SELECT bytes FROM total"));
    ASSIGN_OR_RETURN(const bool row, total.Step());
    if (row && total.Int(0) <= options_.bytes_max) return 0;
  }
  // The newest is left out by its place.
  return RemoveWhile(
      "SELECT id FROM jobs WHERE expire_us IS NOT NULL AND (SELECT bytes FROM total) > ? "
      "AND (expire_us, sequence) < (SELECT expire_us, sequence FROM jobs "
      "WHERE expire_us IS NOT NULL ORDER BY expire_us DESC, sequence DESC LIMIT 1) "
      "ORDER BY expire_us, sequence LIMIT 1",
      options_.bytes_max);
}

absl::StatusOr<absl::Time> JobStore::NextExpiry() {
  ASSIGN_OR_RETURN(Statement next, Prepare("SELECT expire_us FROM jobs WHERE expire_us IS NOT NULL "
                                           "ORDER BY expire_us LIMIT 1"));
  ASSIGN_OR_RETURN(const bool row, next.Step());
  return row ? absl::FromUnixMicros(next.Int(0)) : absl::InfiniteFuture();
}

std::filesystem::path JobStore::ResultPath(const std::string& id) const {
  return options_.folder / kResultsName / absl::StrCat(id, kResultSuffix);
}

std::filesystem::path JobStore::TimelinePath(const std::string& id) const {
  return options_.folder / kResultsName / absl::StrCat(id, kTimelineSuffix);
}

}  // namespace dlo
