// An open file that is closed with its owner. Move-only.
//
//   Descriptor folder(open("/var/lib", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
//   if (!folder) return errno;
//
// A lock (flock) on it ends when the last copy of it is closed. It is never unlocked: a child of
// fork that lets its copy go must not free its parent's lock.
#pragma once

#include <unistd.h>

#include <utility>

namespace dlo::hwr {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

}  // namespace dlo::hwr
