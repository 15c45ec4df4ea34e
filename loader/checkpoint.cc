#include "loader/checkpoint.h"

#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "loader/messages.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kFileNames[] = {"diffusion_pytorch_model.safetensors",
                                            "model.safetensors"};

// What is wrong with a shard's name, or empty. Only the text is judged: a symbolic link to
// elsewhere is how the Hugging Face cache lays out a snapshot.
std::string ShardNameProblem(absl::string_view file) {
  if (file.empty()) return "is empty";
  if (file.find('\0') != file.npos) return "holds a NUL byte";
  if (absl::StartsWith(file, "/")) return "is absolute; it must lie inside the folder";
  for (absl::string_view part : absl::StrSplit(file, '/')) {
    if (part == "..") return "leaves the folder";
    if (part.empty() || part == ".") return "is not in its simplest form";
  }
  return "";
}

absl::StatusOr<std::map<std::string, std::string>> WeightMap(const nlohmann::json& index,
                                                             absl::string_view name) {
  auto refuse = [name](auto&&... parts) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": ", parts...));
  };
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    return refuse("an index must be an object whose weight_map is an object");
  }
  std::map<std::string, std::string> weight_map;
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    if (!file.is_string()) {
      return refuse("the file of tensor ", QuoteForMessage(tensor), " must be a string, not ",
                    file.type_name());
    }
    const std::string& file_name = file.get_ref<const std::string&>();
    if (std::string problem = ShardNameProblem(file_name); !problem.empty()) {
      return refuse("the file name ", QuoteForMessage(file_name), " of tensor ",
                    QuoteForMessage(tensor), " ", problem);
    }
    weight_map.emplace(tensor, file_name);
  }
  if (weight_map.empty()) return refuse("its weight_map is empty");
  return weight_map;
}

// The index and its shards must agree on which tensor lies where, in both directions.
absl::Status CheckIndex(const std::string& index, const std::map<std::string, std::string>& map,
                        const std::map<std::string, const SafetensorsFile*>& shards) {
  Offenders absent, unlisted;
  for (const auto& [tensor, shard] : map) {
    if (shards.at(shard)->tensors().count(tensor) == 0) {
      absent.Add(absl::StrCat(QuoteForMessage(tensor), " in ", shards.at(shard)->path().native()));
    }
  }
  for (const auto& [shard, file] : shards) {
    for (const auto& [tensor, entry] : file->tensors()) {
      auto listed = map.find(tensor);
      if (listed == map.end()) {
        unlisted.Add(absl::StrCat(QuoteForMessage(tensor), " in ", file->path().native()));
      } else if (listed->second != shard) {
        unlisted.Add(absl::StrCat(QuoteForMessage(tensor), " in ", file->path().native(),
                                  " (the index places it in ", listed->second, ")"));
      }
    }
  }
  std::vector<std::string> problems;
  if (!absent.empty()) {
    problems.push_back(
        absl::StrCat("lists tensors that their file does not hold, ", absent.Text()));
  }
  if (!unlisted.empty()) {
    problems.push_back(
        absl::StrCat("does not list tensors that its files hold, ", unlisted.Text()));
  }
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(index, " ", absl::StrJoin(problems, "; it ")));
}

}  // namespace

absl::StatusOr<std::map<std::string, std::string>> ParseSafetensorsIndex(absl::string_view json,
                                                                         absl::string_view name) {
  ASSIGN_OR_RETURN(nlohmann::json index, ParseJson(json, name));
  return WeightMap(index, name);
}

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::filesystem::path& component_dir) {
  std::error_code ignored;
  if (!fs::is_directory(component_dir, ignored)) {
    return absl::NotFoundError(absl::StrCat("no folder ", component_dir.native()));
  }
  Checkpoint checkpoint;
  checkpoint.dir_ = component_dir;

  for (absl::string_view file_name : kFileNames) {
    const fs::path single = component_dir / std::string(file_name);
    const fs::path index = component_dir / absl::StrCat(file_name, ".index.json");
    // symlink_status: a dangling link must fail with its own name, not count as absent.
    const bool has_index = fs::exists(fs::symlink_status(index, ignored));
    if (!has_index && !fs::exists(fs::symlink_status(single, ignored))) continue;

    if (has_index) {
      ASSIGN_OR_RETURN(nlohmann::json json, ReadJsonFile(index));
      ASSIGN_OR_RETURN(auto weight_map, WeightMap(json, index.native()));
      std::set<std::string> names;
      for (const auto& [tensor, shard] : weight_map) names.insert(shard);
      checkpoint.files_.reserve(names.size());
      std::map<std::string, const SafetensorsFile*> shards;
      for (const std::string& shard : names) {
        absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(component_dir / shard);
        if (!file.ok()) {
          return absl::Status(
              file.status().code(),
              absl::StrCat(file.status().message(), " (named by ", index.native(), ")"));
        }
        checkpoint.files_.push_back(*std::move(file));
        shards.emplace(shard, &checkpoint.files_.back());
      }
      RETURN_IF_ERROR(CheckIndex(index.native(), weight_map, shards));
    } else {
      ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(single));
      checkpoint.files_.push_back(std::move(file));
    }
    for (size_t i = 0; i < checkpoint.files_.size(); ++i) {
      for (const auto& [name, entry] : checkpoint.files_[i].tensors()) {
        checkpoint.tensors_.emplace(name, Location{i, &entry});
      }
    }
    return checkpoint;
  }
  return absl::NotFoundError(absl::StrCat("no weights in ", component_dir.native(), ": looked for ",
                                          absl::StrJoin(kFileNames, " and "),
                                          ", each also with .index.json"));
}

std::optional<TensorSource> Checkpoint::Find(absl::string_view name) const {
  auto it = tensors_.find(name);
  if (it == tensors_.end()) return std::nullopt;
  const SafetensorsFile& file = files_[it->second.file];
  const SafetensorsEntry& entry = *it->second.entry;
  return TensorSource{.dtype = entry.dtype,
                      .shape = entry.shape,
                      .data = file.data(entry),
                      .file = file.path().native(),
                      .name = it->first,
                      .mapping = &file.mapping()};
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  names.reserve(tensors_.size());
  for (const auto& [name, location] : tensors_) names.push_back(name);
  return names;
}

}  // namespace dlo
