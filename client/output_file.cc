#include "client/output_file.h"

#include <sys/stat.h>

#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace dlo {
namespace {

constexpr size_t kHashCharactersInName = 16;

std::filesystem::path Hidden(const std::filesystem::path& path, absl::string_view suffix) {
  return path.parent_path() / absl::StrCat(".", path.filename().string(), ".", suffix);
}

// What open(2) would give; only setting the mask tells it.
mode_t DefaultMode() {
  const mode_t mask = umask(0);
  umask(mask);
  return 0666 & ~mask;
}

absl::Status CheckNoFolder(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(path.string(), ": is a folder"));
}

}  // namespace

absl::StatusOr<VideoFormat> FormatOfPath(const std::filesystem::path& path) {
  const std::string ending = absl::AsciiStrToLower(path.extension().string());
  if (ending == ".mp4") return VideoFormat::kMp4;
  if (ending == ".png") return VideoFormat::kPngSheet;
  if (ending == ".safetensors") return VideoFormat::kSafetensors;
  return absl::InvalidArgumentError(absl::StrCat(
      "--output ", path.string(), ": the file's ending must be .mp4 (video), .png (contact sheet) ",
      "or .safetensors (lossless frames)"));
}

absl::StatusOr<OutputFile> OutputFile::Create(const std::filesystem::path& path) {
  RETURN_IF_ERROR(CheckNoFolder(path));
  ASSIGN_OR_RETURN(AtomicFile file,
                   AtomicFile::Create(path, Hidden(path, "XXXXXX"), DefaultMode()));
  return OutputFile(std::move(file));
}

absl::StatusOr<OutputFile> OutputFile::Resume(const std::filesystem::path& path,
                                              absl::string_view sha256, int64_t bytes_max) {
  RETURN_IF_ERROR(CheckNoFolder(path));
  std::string name;
  // The server's text goes into a file's name.
  for (char c : sha256.substr(0, kHashCharactersInName)) {
    if (absl::ascii_isxdigit(static_cast<unsigned char>(c))) name.push_back(c);
  }
  ASSIGN_OR_RETURN(
      AtomicFile file,
      AtomicFile::Resume(path, Hidden(path, absl::StrCat(name, ".partial")), DefaultMode()));
  if (file.size_bytes() > bytes_max) RETURN_IF_ERROR(file.Truncate());
  return OutputFile(std::move(file));
}

absl::Status OutputFile::Commit(absl::string_view sha256) {
  const std::string received = file_.Sha256Hex();
  if (received != absl::AsciiStrToLower(sha256)) {
    return absl::DataLossError(absl::StrCat(path().string(), ": the ", size_bytes(),
                                            " bytes received have SHA-256 ", received,
                                            ", the server sent ", sha256));
  }
  return file_.Commit();
}

}  // namespace dlo
