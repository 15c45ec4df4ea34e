// The file system as a store uses it, so that a test can make any step fail or be the last thing a
// process does. Each method is the system call of its name: -1 and errno for a failure.
//
//   int fd = ops.OpenAt(folder, "manifest.json", O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600);
//
// Stateless; any thread.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace dlo::hwr {

class FileOps {
 public:
  virtual ~FileOps() = default;

  virtual int OpenAt(int folder, const char* name, int flags, mode_t mode);  // O_CLOEXEC is added
  virtual int MkdirAt(int folder, const char* name, mode_t mode);
  virtual ssize_t Write(int fd, const void* bytes, size_t size);
  virtual int Allocate(int fd, int64_t bytes);  // a file's size, with its space where that is known
  virtual int Fsync(int fd);
  virtual int RenameAt(int from_folder, const char* from, int to_folder, const char* to);
  virtual int UnlinkAt(int folder, const char* name, int flags);
  virtual int Chmod(int fd, mode_t mode);
  virtual int Touch(int fd);  // times of access and modification: now
  virtual ssize_t ReadAt(int fd, void* to, size_t size, int64_t offset);
  virtual int64_t FreeBytes(int fd);  // of its filesystem, for this user; -1 for a failure
};

FileOps& SystemFileOps();

}  // namespace dlo::hwr
