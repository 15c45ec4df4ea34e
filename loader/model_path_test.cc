#include "loader/model_path.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "loader/test_folder.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kCommit[] = "0123456789abcdef0123456789abcdef01234567";

class ModelPathTest : public ::testing::Test {
 protected:
  EnvironmentLookup Environment() const {
    return [this](const char* name) -> std::optional<std::string> {
      auto it = variables_.find(name);
      return it == variables_.end() ? std::nullopt : std::optional(it->second);
    };
  }
  absl::StatusOr<fs::path> Resolve(const std::string& text) const {
    return ResolveModelPath(text, Environment());
  }
  std::string Message(const std::string& text) const {
    return std::string(Resolve(text).status().message());
  }
  // A cached repository under `cache` whose `ref` points at `commit`; returns the snapshot.
  fs::path Cache(const std::string& cache, const std::string& ref = "main",
                 const std::string& commit = kCommit) const {
    const std::string repository = absl::StrCat(cache, "/models--org--Model-1.3B");
    folder_.Write(absl::StrCat(repository, "/refs/", ref), commit);
    folder_.Write(absl::StrCat(repository, "/snapshots/", commit, "/model_index.json"), "{}");
    return folder_ / absl::StrCat(repository, "/snapshots/", commit);
  }
  std::string Path(const std::string& name) const { return (folder_ / name).native(); }

  TempFolder folder_;
  std::map<std::string, std::string> variables_ = {{"HOME", Path("home")}};
};

TEST_F(ModelPathTest, AnExistingFolderIsTakenAsItIs) {
  fs::create_directories(folder_ / "org/Model-1.3B");
  Cache("home/.cache/huggingface/hub");
  EXPECT_EQ(Resolve(Path("org/Model-1.3B")).value(), folder_ / "org/Model-1.3B");

  // Also where it reads like an id.
  const fs::path before = fs::current_path();
  fs::current_path(folder_.path());
  auto relative = Resolve("org/Model-1.3B");
  fs::current_path(before);
  EXPECT_EQ(relative.value(), fs::path("org/Model-1.3B"));
}

TEST_F(ModelPathTest, ATildeIsTheHomeFolder) {
  fs::create_directories(folder_ / "home/models/x");
  EXPECT_EQ(Resolve("~/models/x").value(), folder_ / "home/models/x");
}

TEST_F(ModelPathTest, CachePlacesInTheirOrder) {
  const fs::path from_home = Cache("home/.cache/huggingface/hub");
  const fs::path from_xdg = Cache("xdg/huggingface/hub");
  const fs::path from_hf_home = Cache("hf_home/hub");
  const fs::path from_old_name = Cache("old_name");
  const fs::path from_hub_cache = Cache("hub_cache");
  EXPECT_EQ(Resolve("org/Model-1.3B").value(), from_home);
  variables_["XDG_CACHE_HOME"] = Path("xdg");
  EXPECT_EQ(Resolve("org/Model-1.3B").value(), from_xdg);
  variables_["HF_HOME"] = Path("hf_home");
  EXPECT_EQ(Resolve("org/Model-1.3B").value(), from_hf_home);
  variables_["HUGGINGFACE_HUB_CACHE"] = Path("old_name");
  EXPECT_EQ(Resolve("org/Model-1.3B").value(), from_old_name);
  variables_["HF_HUB_CACHE"] = Path("hub_cache");
  EXPECT_EQ(Resolve("org/Model-1.3B").value(), from_hub_cache);

  for (auto& [name, value] : variables_) {
    if (name != "HOME") value = "";
  }
  EXPECT_EQ(Resolve("org/Model-1.3B").value(), from_home) << "a variable set to nothing counts";
  variables_["HF_HOME"] = "~/../hf_home";
  EXPECT_TRUE(fs::equivalent(Resolve("org/Model-1.3B").value(), from_hf_home));
}

TEST_F(ModelPathTest, OnlyTheFirstPlaceThatIsSetCounts) {
  Cache("home/.cache/huggingface/hub");
  variables_["HF_HOME"] = Path("elsewhere");
  EXPECT_EQ(Resolve("org/Model-1.3B").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Message("org/Model-1.3B"), HasSubstr(Path("elsewhere/hub/models--org--Model-1.3B")));
}

TEST_F(ModelPathTest, RevisionIsABranchATagOrACommit) {
  const std::string other(40, 'f');
  const fs::path main = Cache("home/.cache/huggingface/hub");
  const fs::path branch = Cache("home/.cache/huggingface/hub", "v2", other + "\n");
  const fs::path pull = Cache("home/.cache/huggingface/hub", "refs/pr/1", std::string(40, 'e'));
  EXPECT_EQ(Resolve("org/Model-1.3B").value(), main);
  EXPECT_EQ(Resolve("org/Model-1.3B@main").value(), main);
  EXPECT_EQ(Resolve(absl::StrCat("org/Model-1.3B@", kCommit)).value(), main);
  EXPECT_EQ(Resolve("org/Model-1.3B@refs/pr/1").value(), pull);
  EXPECT_EQ(Resolve("org/Model-1.3B@unknown").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(
      Message("org/Model-1.3B@unknown"),
      AllOf(HasSubstr("hf download org/Model-1.3B --revision unknown"), HasSubstr("refs/unknown")));
  // The newline that some tools write after the commit.
  fs::rename(branch, folder_ / absl::StrCat("home/.cache/huggingface/hub/models--org--Model-1.3B/"
                                            "snapshots/",
                                            other));
  EXPECT_EQ(Resolve("org/Model-1.3B@v2").value().filename(), other);
}

TEST_F(ModelPathTest, MissingModelNamesThePlacesAndTheCommand) {
  EXPECT_EQ(Resolve("org/Model-1.3B").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Message("org/Model-1.3B"),
              AllOf(HasSubstr((fs::current_path() / "org/Model-1.3B").native()),
                    HasSubstr(Path("home/.cache/huggingface/hub/models--org--Model-1.3B")),
                    HasSubstr("hf download org/Model-1.3B"), Not(HasSubstr("--revision"))));
}

TEST_F(ModelPathTest, ARefWithoutItsSnapshotSaysSo) {
  const fs::path snapshot = Cache("home/.cache/huggingface/hub");
  fs::remove_all(snapshot);
  EXPECT_EQ(Resolve("org/Model-1.3B").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Message("org/Model-1.3B"), AllOf(HasSubstr(snapshot.native()), HasSubstr("refs/main"),
                                               HasSubstr("hf download")));
}

TEST_F(ModelPathTest, ARefCannotLeadOutOfTheCache) {
  fs::create_directories(folder_ / "home/secret");
  Cache("home/.cache/huggingface/hub");
  folder_.Write("home/.cache/huggingface/hub/models--org--Model-1.3B/refs/main",
                "../../../../../../secret");
  EXPECT_EQ(Resolve("org/Model-1.3B").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ModelPathTest, TextThatIsNoIdGetsNoDownloadCommand) {
  for (const char* text :
       {"name", "/no/such/folder", "./org/name", "../org/name", "a/b/c", "org/", "/name",
        "org/na me", "org/../x", "org/..", "-org/name", "org/.name", "org/name@", "org/name@../x",
        "org/name@/x", "org/name@a;b", "org/name@-x", "org/$(x)"}) {
    EXPECT_EQ(Resolve(text).status().code(), absl::StatusCode::kNotFound) << text;
    EXPECT_THAT(Message(text), AllOf(Not(HasSubstr("hf download")), HasSubstr("org/name@revision")))
        << text;
  }
}

TEST_F(ModelPathTest, EmptyTextAndFilesAreRefused) {
  EXPECT_EQ(Resolve("").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Resolve(std::string("a\0b", 3)).status().code(), absl::StatusCode::kInvalidArgument);
  const std::string file = folder_.Write("model.safetensors", "");
  EXPECT_EQ(Resolve(file).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(file), AllOf(HasSubstr(file), HasSubstr("model_index.json")));
}

}  // namespace
}  // namespace dlo
