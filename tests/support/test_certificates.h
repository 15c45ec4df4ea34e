// A certificate authority of a test, by the openssl program.
//
//   ASSIGN_OR_RETURN(const TestCa ca, TestCa::Create(folder / "ca"));
//   ASSIGN_OR_RETURN(const LinkTlsFiles server, ca.Issue("server", "IP:10.77.0.1"));
#pragma once

#include <filesystem>
#include <string>

#include "absl/status/statusor.h"
#include "proto/link_channel.h"

namespace dlo {

class TestCa {
 public:
  // In the folder, which is made.
  static absl::StatusOr<TestCa> Create(const std::filesystem::path& folder);

  // A certificate for the names in `subject_alt_names`, valid for `days` from now; below 0: it was
  // until so many days ago.
  absl::StatusOr<LinkTlsFiles> Issue(const std::string& name, const std::string& subject_alt_names,
                                     int days = 2) const;

 private:
  explicit TestCa(std::filesystem::path folder) : folder_(std::move(folder)) {}

  std::filesystem::path folder_;
};

}  // namespace dlo
