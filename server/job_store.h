// What outlives the server: the records of jobs, in SQLite, and their results, in files beside it.
//
//   ASSIGN_OR_RETURN(auto store, JobStore::Open({.folder = "/var/lib/dlo"}));
//   store->Transaction({[&](JobStore& s) { return s.Insert(record); }}, &statuses);
//   ASSIGN_OR_RETURN(AtomicFile writer, CreateResult(store->ResultPath(id)));
//
// The folder (made if need be, for its owner only) holds `jobs.db` with its -wal and -shm files,
// `results/` and `lock`. One process at a time has it open. A job has ended once it has an expire
// time; then, and only then, time to live and size limit apply to it. What request and job blobs
// mean is the caller's affair.
//
// A transaction that Transaction reported as done survives the death of the process and of the
// machine (write-ahead log, flushed at each commit). A file in results/ that belongs to no record
// of a finished job is removed at the next Open, so a crash between the writing of a result and
// that of its record leaves nothing behind.
//
// One thread at a time, but for the paths of results, which any thread may ask for. Errors:
// RESOURCE_EXHAUSTED when the disk is full, DATA_LOSS when the database is damaged, INTERNAL for
// the rest; each names the file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/result_file.h"

struct sqlite3;
struct sqlite3_stmt;

namespace dlo {

struct JobStoreOptions {
  std::filesystem::path folder;
  // Of results and records of ended jobs, kept below by removing the oldest. The last one to end
  // stays in any case.
  int64_t bytes_max = int64_t{10} << 30;
};

struct JobRecord {
  int64_t sequence = 0;  // set by the store; grows from job to job
  std::string id;
  int state = 0;
  std::optional<absl::Time> expire_time;  // set: the job has ended
  std::optional<absl::Time> deadline;
  int64_t result_bytes = 0;  // with the timeline's
  std::string request;
  std::string job;
};

class JobStore {
 public:
  using Operation = std::function<absl::Status(JobStore&)>;

  // UNAVAILABLE: another process has it open. DATA_LOSS: jobs.db is damaged or no database; the
  // message says what to do. FAILED_PRECONDITION: it was written by a later version.
  static absl::StatusOr<std::unique_ptr<JobStore>> Open(const JobStoreOptions& options);
  ~JobStore();
  JobStore(const JobStore&) = delete;
  JobStore& operator=(const JobStore&) = delete;

  // Runs the operations in turn and makes them durable together. When one of them or the commit
  // fails, all are undone and each is run again on its own, so that only what cannot be done is
  // not: an operation may run twice. One status for each.
  std::vector<absl::Status> Transaction(const std::vector<Operation>& operations);

  // The rest is for operations.

  // ALREADY_EXISTS if there is a job of that id.
  absl::Status Insert(const JobRecord& record);
  // Takes over state, expire_time, result_bytes and job. NOT_FOUND if there is no job of that id.
  absl::Status Update(const JobRecord& record);
  absl::StatusOr<std::optional<JobRecord>> Find(const std::string& id);
  // Jobs that have not ended, the oldest first.
  absl::StatusOr<std::vector<JobRecord>> Unfinished();
  // The newest first: at most `limit` jobs before `before` (0: no bound) in one of `states` (empty:
  // any).
  absl::StatusOr<std::vector<JobRecord>> List(const std::vector<int>& states, int64_t before,
                                              int limit);
  // With the result. False if there is no job of that id.
  absl::StatusOr<bool> Remove(const std::string& id);
  // Removes what has expired; returns how many jobs.
  absl::StatusOr<int> RemoveExpired(absl::Time now);
  // Removes the oldest ended jobs while they take more than bytes_max; returns how many.
  absl::StatusOr<int> RemoveForRoom();
  // InfiniteFuture if nothing will.
  absl::StatusOr<absl::Time> NextExpiry();

  // Where the result of a job lies. Ids are of [A-Za-z0-9._-].
  std::filesystem::path ResultPath(const std::string& id) const;
  // And its timeline, which goes with it.
  std::filesystem::path TimelinePath(const std::string& id) const;

 private:
  class Statement;
  class LockFile;

  JobStore(JobStoreOptions options, std::unique_ptr<LockFile> lock);
  absl::Status OpenDatabase();
  absl::Status CheckVersion();
  absl::Status RemoveOrphans();
  absl::Status Execute(const char* sql);
  absl::Status Error(int code) const;
  absl::StatusOr<std::vector<JobRecord>> Select(Statement& statement);
  absl::StatusOr<int> RemoveWhile(const char* sql, int64_t bound);
  absl::Status RunInTransaction(const std::vector<Operation>& operations,
                                std::vector<absl::Status>* statuses);
  absl::StatusOr<Statement> Prepare(const std::string& sql);

  const JobStoreOptions options_;
  const std::unique_ptr<LockFile> lock_;
  sqlite3* database_ = nullptr;
  // Prepared before and not in use.
  std::multimap<std::string, sqlite3_stmt*> statements_;
  std::vector<std::string> removed_;  // in the transaction that runs: whose results go with it
};

}  // namespace dlo
