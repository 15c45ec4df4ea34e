#include "tests/support/test_certificates.h"

#include <stdlib.h>

#include <fstream>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace dlo {
namespace {

constexpr char kNewKey[] = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";

absl::Status OpenSsl(const std::filesystem::path& folder, const std::string& arguments) {
  const std::string command =
      absl::StrCat("cd '", folder.string(), "' && openssl ", arguments, " 2>>log");
  if (system(command.c_str()) == 0) return absl::OkStatus();
  std::ifstream log(folder / "log");
  const std::string text{std::istreambuf_iterator<char>(log), std::istreambuf_iterator<char>()};
  return absl::FailedPreconditionError(absl::StrCat(command, ": ", text));
}

}  // namespace

absl::StatusOr<TestCa> TestCa::Create(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  RETURN_IF_ERROR(OpenSsl(
      folder, absl::StrCat("req -x509 ", kNewKey, " -days 2 -subj /CN=", folder.filename().string(),
                           " -keyout ca.key -out ca.pem")));
  return TestCa(folder);
}

absl::StatusOr<LinkTlsFiles> TestCa::Issue(const std::string& name,
                                           const std::string& subject_alt_names, int days) const {
  std::ofstream(folder_ / "extensions") << "subjectAltName=" << subject_alt_names << "\n";
  RETURN_IF_ERROR(OpenSsl(folder_, absl::StrCat("req -new ", kNewKey, " -subj /CN=", name,
                                                " -keyout ", name, ".key -out ", name, ".csr")));
  RETURN_IF_ERROR(OpenSsl(folder_, absl::StrCat("x509 -req -in ", name,
                                                ".csr -CA ca.pem -CAkey ca.key "
                                                "-CAcreateserial -extfile extensions -days ",
                                                days, " -out ", name, ".pem")));
  const auto path = [&](const std::string& file) { return (folder_ / file).string(); };
  return LinkTlsFiles{path("ca.pem"), path(name + ".pem"), path(name + ".key")};
}

}  // namespace dlo
