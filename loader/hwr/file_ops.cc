#include "loader/hwr/file_ops.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace dlo::hwr {

int FileOps::OpenAt(int folder, const char* name, int flags, mode_t mode) {
  return openat(folder, name, flags | O_CLOEXEC, mode);
}

int FileOps::MkdirAt(int folder, const char* name, mode_t mode) {
  return mkdirat(folder, name, mode);
}

ssize_t FileOps::Write(int fd, const void* bytes, size_t size) { return write(fd, bytes, size); }

int FileOps::Allocate(int fd, int64_t bytes) {
  if (fallocate(fd, 0, 0, bytes) == 0) return 0;
  if (errno != EOPNOTSUPP && errno != ENOSYS) return -1;
  return ftruncate(fd, bytes);
}

int FileOps::Fsync(int fd) { return fsync(fd); }

int FileOps::RenameAt(int from_folder, const char* from, int to_folder, const char* to) {
  return renameat(from_folder, from, to_folder, to);
}

int FileOps::UnlinkAt(int folder, const char* name, int flags) {
  return unlinkat(folder, name, flags);
}

int FileOps::Chmod(int fd, mode_t mode) { return fchmod(fd, mode); }

int FileOps::Touch(int fd) { return futimens(fd, nullptr); }

ssize_t FileOps::ReadAt(int fd, void* to, size_t size, int64_t offset) {
  return pread(fd, to, size, offset);
}

int64_t FileOps::FreeBytes(int fd) {
  struct statvfs info;
  if (fstatvfs(fd, &info) != 0) return -1;
  return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

FileOps& SystemFileOps() {
  static FileOps ops;
  return ops;
}

}  // namespace dlo::hwr
