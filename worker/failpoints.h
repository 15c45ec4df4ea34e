// Faults that tests stage in a real worker, at its two seams: the loading of the model and the
// messages to dlo-serve. Off unless dlo-worker was started with --failpoints=FOLDER, which nothing
// but a test's wrapper around the program does.
//
//   printf hold > FOLDER/denoising.1     # rank 1 stops when it begins to denoise ...
//   cat FOLDER/reached.denoising.1       # ... and writes its process id here
//   rm FOLDER/denoising.1                # it goes on
//
// A file names a place and a rank, or with `.all` in the rank's stead every rank that has no file
// of its own; its text is what happens there, each time that a worker comes by:
//
//   place                          when
//   loading                        before the model is loaded
//   ready, encoding, denoising,    behind the message that says so
//   step, decoding
//   chunk                          a part of the result; what is held has been sent
//   finished                       the message behind the last part
//
//   note                           writes reached.PLACE.RANK
//   hold                           the same, then waits until the file is gone
//   cut                            the link's socket is shut down
//   garbage                        bytes that are no message go into the link's socket
//   drop, twice                    the message is not sent, or twice
//   offset, flip, foreign (chunk)  it is sent with another offset, a wrong byte, another wave's id
//   size, sha256 (finished)        it is sent with another size or digest
//
// Without a folder every call is a test of an empty string. Used by the thread that works.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "dlo/v1/worker_link.pb.h"

namespace dlo {

class Failpoints {
 public:
  Failpoints(std::string folder, int rank, int link_fd)
      : folder_(std::move(folder)), rank_(rank), link_fd_(link_fd) {}

  void OnLoading() const;
  // Sends the message, or what the faults make of it. False if `send` was.
  bool Send(v1::FromWorker message, const std::function<bool(v1::FromWorker)>& send) const;

 private:
  // The text of the place's file and its path; empty: none.
  std::string Action(const std::string& place, std::string* path) const;
  void Reach(const std::string& place, const std::string& action, const std::string& path) const;

  const std::string folder_;
  const int rank_;
  const int link_fd_;
};

}  // namespace dlo
