// Two hosts on one machine, for tests of what goes over a network: two network namespaces joined by
// a cable.
//
//   int main(int argc, char** argv) {
//     testing::InitGoogleTest(&argc, argv);
//     if (absl::Status status = EnterNetNamespace(); !status.ok()) { ...; return 1; }
//     return RUN_ALL_TESTS();
//   }
//   ASSIGN_OR_RETURN(std::unique_ptr<TwoHosts> hosts, TwoHosts::Create());
//   ChildProcess::Start(hosts->OnOther({"bin/dlo-worker", "--connect", "10.77.0.1:7070"}));
//   hosts->Cut();
//
// This process is one host. Neither namespace has a name, so both are gone with the last process in
// them, however it ends.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace dlo {

// Puts this process into a network namespace of its own, in a user namespace where it may not do
// that otherwise. Before it has any other thread.
absl::Status EnterNetNamespace();

class TwoHosts {
 public:
  static constexpr char kHere[] = "10.77.0.1";
  static constexpr char kOther[] = "10.77.0.2";

  // One at a time. FAILED_PRECONDITION with the command that does not work here.
  static absl::StatusOr<std::unique_ptr<TwoHosts>> Create();
  ~TwoHosts();
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  // The command line that runs `argv` on the other host; its process is the program's own.
  std::vector<std::string> OnOther(std::vector<std::string> argv) const;

  absl::Status Cut();      // the cable: packets are lost without a word
  absl::Status Restore();  // ... and plugged in again

 private:
  explicit TwoHosts(int other) : other_(other) {}
  std::string OtherNamespace() const;
  std::string InOther(const std::string& command) const;

  const int other_;  // descriptor of the other host's namespace, which it keeps
};

}  // namespace dlo
