#include "loader/hwr/folder_io.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"

namespace dlo::hwr {
namespace {

constexpr int kDepthMax = 8;  // a store has three

// The duration of a first and of a later look at a lock.
constexpr absl::Duration kFirstWait = absl::Milliseconds(1);
constexpr absl::Duration kWaitMax = absl::Milliseconds(50);

// To look at a flock is to take it. So whoever has it shared also has a read lock of this kind,
// which ends with the open file as well; nobody ever has one for writing.
struct flock WholeFile(short type) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  return lock;
}

bool IsStructural(int code) {
  return code == EACCES || code == EISDIR || code == ELOOP || code == ENOTDIR || code == EPERM;
}

}  // namespace

absl::Status IoError(absl::string_view what) {
  const int code = errno;
  const std::string message = absl::StrCat(what, ": ", strerror(code));
  if (code == ENOSPC || code == EDQUOT || code == EFBIG) {
    return absl::ResourceExhaustedError(message);
  }
  if (IsStructural(code)) return absl::DataLossError(message);
  if (code == ENOENT) return absl::NotFoundError(message);
  return absl::UnavailableError(message);
}

absl::Status Lock(int fd, LockKind kind, absl::Time deadline) {
  const int operation = kind == LockKind::kShared ? LOCK_SH : LOCK_EX;
  absl::Duration wait = kFirstWait;
  while (flock(fd, operation | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return IoError("cannot lock");
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError("another process holds the lock");
    }
    absl::SleepFor(std::min(wait, left));
    wait = std::min(2 * wait, kWaitMax);
  }
  if (kind == LockKind::kShared) {
    struct flock mark = WholeFile(F_RDLCK);
    fcntl(fd, F_OFD_SETLK, &mark);
  }
  return absl::OkStatus();
}

bool TryLock(int fd, LockKind kind) {
  return flock(fd, (kind == LockKind::kShared ? LOCK_SH : LOCK_EX) | LOCK_NB) == 0;
}

bool IsShared(int fd) {
  struct flock mark = WholeFile(F_WRLCK);
  return fcntl(fd, F_OFD_GETLK, &mark) == 0 && mark.l_type == F_RDLCK;
}

absl::StatusOr<Descriptor> OpenFolder(FileOps& ops, int parent, const std::string& name) {
  Descriptor folder(
      ops.OpenAt(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK, 0));
  if (!folder) return IoError(absl::StrCat("cannot open the folder ", name));
  return folder;
}

absl::StatusOr<Descriptor> MakeFolder(FileOps& ops, int parent, const std::string& name) {
  if (ops.MkdirAt(parent, name.c_str(), 0700) != 0 && errno != EEXIST) {
    return IoError(absl::StrCat("cannot make the folder ", name));
  }
  return OpenFolder(ops, parent, name);
}

absl::Status CheckPrivate(int fd, absl::string_view what) {
  struct stat info;
  if (fstat(fd, &info) != 0) return IoError(absl::StrCat("cannot stat ", what));
  if (!S_ISDIR(info.st_mode)) return absl::DataLossError(absl::StrCat(what, " is no folder"));
  if (info.st_uid != geteuid()) {
    return absl::DataLossError(absl::StrCat(what, " belongs to user ", info.st_uid));
  }
  if ((info.st_mode & 022) != 0) {
    return absl::DataLossError(absl::StrCat(what, " may be written to by others: chmod go-w"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Descriptor> OpenPublished(FileOps& ops, int folder, const std::string& name,
                                         struct stat* info) {
  // O_NONBLOCK: a FIFO in the file's place must not hang the open.
  Descriptor file(ops.OpenAt(folder, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK, 0));
  if (!file) {
    const absl::Status status = IoError(absl::StrCat("cannot open ", name));
    return absl::IsNotFound(status) ? absl::DataLossError(status.message()) : status;
  }
  if (fstat(file.get(), info) != 0) return IoError(absl::StrCat("cannot stat ", name));
  if (!S_ISREG(info->st_mode)) {
    return absl::DataLossError(absl::StrCat(name, " is no regular file"));
  }
  if (info->st_uid != geteuid()) {
    return absl::DataLossError(absl::StrCat(name, " belongs to user ", info->st_uid));
  }
  if ((info->st_mode & 07777) != 0444) {
    return absl::DataLossError(
        absl::StrFormat("%s has mode %04o, not 0444", name, info->st_mode & 07777));
  }
  if (info->st_nlink != 1) {
    return absl::DataLossError(absl::StrCat(name, " has ", info->st_nlink, " links"));
  }
  return file;
}

absl::StatusOr<std::string> ReadAll(FileOps& ops, int fd, int64_t bytes_max) {
  struct stat info;
  if (fstat(fd, &info) != 0) return IoError("cannot stat");
  if (info.st_size > bytes_max) {
    return absl::DataLossError(absl::StrCat(info.st_size, " bytes are too many"));
  }
  std::string bytes(info.st_size, '\0');
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got =
        ops.ReadAt(fd, bytes.data() + done, bytes.size() - done, static_cast<int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return IoError("cannot read");
    if (got == 0) return absl::DataLossError("the file ends early");
    done += got;
  }
  return bytes;
}

absl::StatusOr<std::string> ReadOwn(FileOps& ops, int folder, const std::string& name,
                                    int64_t bytes_max) {
  const Descriptor file(ops.OpenAt(folder, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK, 0));
  if (!file) return IoError(absl::StrCat("cannot open ", name));
  struct stat info;
  if (fstat(file.get(), &info) != 0) return IoError(absl::StrCat("cannot stat ", name));
  if (!S_ISREG(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 022) != 0) {
    return absl::DataLossError(absl::StrCat(name, " is not a file of this user's alone"));
  }
  absl::StatusOr<std::string> bytes = ReadAll(ops, file.get(), bytes_max);
  if (bytes.ok()) return bytes;
  return absl::Status(bytes.status().code(), absl::StrCat(name, ": ", bytes.status().message()));
}

absl::Status WriteAll(FileOps& ops, int fd, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ops.Write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return IoError("cannot write");
    bytes.remove_prefix(written);
  }
  return absl::OkStatus();
}

absl::Status WriteNew(FileOps& ops, int folder, const std::string& name, absl::string_view bytes,
                      mode_t mode) {
  const Descriptor file(
      ops.OpenAt(folder, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  if (!file) return IoError(absl::StrCat("cannot create ", name));
  RETURN_IF_ERROR(WriteAll(ops, file.get(), bytes));
  if (ops.Chmod(file.get(), mode) != 0) return IoError(absl::StrCat("cannot chmod ", name));
  if (ops.Fsync(file.get()) != 0) return IoError(absl::StrCat("cannot flush ", name));
  return absl::OkStatus();
}

absl::Status Replace(FileOps& ops, int folder, const std::string& name, absl::string_view bytes) {
  const std::string temporary = absl::StrCat(name, ".part");
  if (ops.UnlinkAt(folder, temporary.c_str(), 0) != 0 && errno != ENOENT) {
    return IoError(absl::StrCat("cannot remove ", temporary));
  }
  RETURN_IF_ERROR(WriteNew(ops, folder, temporary, bytes, 0600));
  if (ops.RenameAt(folder, temporary.c_str(), folder, name.c_str()) != 0) {
    return IoError(absl::StrCat("cannot rename ", temporary));
  }
  if (ops.Fsync(folder) != 0) return IoError(absl::StrCat("cannot flush the folder of ", name));
  return absl::OkStatus();
}

bool Exists(int folder, const std::string& name) {
  struct stat info;
  return fstatat(folder, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0;
}

bool IsStill(int folder, const std::string& name, const struct stat& info) {
  struct stat now;
  return fstatat(folder, name.c_str(), &now, AT_SYMLINK_NOFOLLOW) == 0 &&
         now.st_dev == info.st_dev && now.st_ino == info.st_ino;
}

absl::StatusOr<std::vector<std::string>> ListNames(int folder) {
  const int copy = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (copy < 0) return IoError("cannot open a folder to list it");
  DIR* const stream = fdopendir(copy);
  if (stream == nullptr) {
    close(copy);
    return IoError("cannot list a folder");
  }
  const absl::Cleanup close_stream = [stream] { closedir(stream); };
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = readdir(stream)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  if (errno != 0) return IoError("cannot list a folder");
  std::sort(names.begin(), names.end());
  return names;
}

namespace {

int64_t BytesBelow(int folder, int depth) {
  if (depth > kDepthMax) return 0;
  const absl::StatusOr<std::vector<std::string>> names = ListNames(folder);
  if (!names.ok()) return 0;
  int64_t bytes = 0;
  for (const std::string& name : *names) {
    struct stat info;
    if (fstatat(folder, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (S_ISREG(info.st_mode)) bytes += info.st_size;
    if (!S_ISDIR(info.st_mode)) continue;
    const Descriptor below(
        openat(folder, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (below) bytes += BytesBelow(below.get(), depth + 1);
  }
  return bytes;
}

absl::Status RemoveTree(FileOps& ops, int folder, const std::string& name, int depth) {
  if (ops.UnlinkAt(folder, name.c_str(), 0) == 0 || errno == ENOENT) return absl::OkStatus();
  if (errno != EISDIR && errno != EPERM) return IoError(absl::StrCat("cannot remove ", name));
  if (depth > kDepthMax) return absl::UnavailableError(absl::StrCat(name, " is too deep"));
  {
    absl::StatusOr<Descriptor> below = OpenFolder(ops, folder, name);
    if (absl::IsNotFound(below.status())) return absl::OkStatus();
    RETURN_IF_ERROR(below.status());
    ASSIGN_OR_RETURN(const std::vector<std::string> names, ListNames(below->get()));
    for (const std::string& inner : names) {
      RETURN_IF_ERROR(RemoveTree(ops, below->get(), inner, depth + 1));
    }
  }
  if (ops.UnlinkAt(folder, name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT) {
    return IoError(absl::StrCat("cannot remove the folder ", name));
  }
  return absl::OkStatus();
}

}  // namespace

int64_t BytesBelow(int folder) { return BytesBelow(folder, 0); }

absl::Status RemoveTree(FileOps& ops, int folder, const std::string& name) {
  return RemoveTree(ops, folder, name, 0);
}

std::string RandomHex(int bytes) {
  std::string random(bytes, '\0');
  size_t done = 0;
  while (done < random.size()) {
    const ssize_t got = getrandom(random.data() + done, random.size() - done, 0);
    if (got > 0) done += got;
  }
  return absl::BytesToHexString(random);
}

}  // namespace dlo::hwr
