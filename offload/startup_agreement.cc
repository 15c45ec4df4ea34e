#include "offload/startup_agreement.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "base/units.h"

namespace dlo {
namespace {

// Every rank's text, by rank.
absl::StatusOr<std::vector<std::string>> Exchange(Communicator& group, const std::string& text) {
  const int64_t bytes = static_cast<int64_t>(text.size());
  std::vector<int64_t> sizes(group.size());
  RETURN_IF_ERROR(group.AllGather(
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(&bytes), sizeof(bytes)),
      absl::MakeSpan(reinterpret_cast<std::byte*>(sizes.data()), sizes.size() * sizeof(int64_t))));
  const size_t largest = std::max<int64_t>(1, *std::max_element(sizes.begin(), sizes.end()));
  std::vector<std::byte> own(largest), all(largest * sizes.size());
  std::memcpy(own.data(), text.data(), text.size());
  RETURN_IF_ERROR(group.AllGather(own, absl::MakeSpan(all)));
  std::vector<std::string> texts;
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    texts.emplace_back(reinterpret_cast<const char*>(all.data()) + rank * largest, sizes[rank]);
  }
  return texts;
}

// No name or value of ours holds a zero byte.
std::string Join(const std::vector<Setting>& settings) {
  return absl::StrJoin(settings, std::string(1, '\0'),
                       [](std::string* out, const Setting& setting) {
                         absl::StrAppend(out, setting.name, std::string(1, '\0'), setting.value);
                       });
}

std::map<std::string, std::string> Split(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, '\0');
  std::map<std::string, std::string> settings;
  for (size_t i = 0; i + 1 < parts.size(); i += 2) settings[parts[i]] = parts[i + 1];
  return settings;
}

}  // namespace

absl::Status AgreeOnSettings(Communicator& group, const std::vector<Setting>& settings) {
  ASSIGN_OR_RETURN(const std::vector<std::string> texts, Exchange(group, Join(settings)));
  const auto shown = [](const std::map<std::string, std::string>& all, const std::string& name) {
    const auto found = all.find(name);
    return found == all.end() ? std::string("nothing") : absl::StrCat("\"", found->second, "\"");
  };
  std::map<std::string, std::string> first = Split(texts[0]);
  std::vector<std::string> differences;
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    std::map<std::string, std::string> names = Split(texts[rank]);
    const std::map<std::string, std::string> other = names;
    names.insert(first.begin(), first.end());
    for (const auto& [name, value] : names) {
      if (shown(first, name) == shown(other, name)) continue;
      differences.push_back(absl::StrCat("rank ", rank, " has ", name, " ", shown(other, name),
                                         " where rank 0 has ", shown(first, name)));
    }
  }
  if (differences.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the ranks of group \"", group.name(), "\" do not agree: ", absl::StrJoin(differences, "; "),
      "; start all ranks with the same build, model and settings"));
}

namespace {

absl::Status TooMuch(const std::string& host, int processes, int64_t need_bytes,
                     int64_t limit_bytes, const std::string& limit_name) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "the streamed weights of ", processes, " processes need ", FormatBytes(need_bytes),
      " of host memory", host.empty() ? "" : absl::StrCat(" on host ", host), ", more than the ",
      FormatBytes(limit_bytes), " of ", limit_name,
      "; use transfer allgather over more replicas, a smaller dtype, or a higher limit"));
}

}  // namespace

absl::Status AgreeOnHostMemory(Communicator& group, const HostMemoryNeed& need) {
  ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                   Exchange(group, Join({{"need", absl::StrCat(need.need_bytes)},
                                         {"limit", absl::StrCat(need.limit_bytes)},
                                         {"name", need.limit_name},
                                         {"host", need.host}})));
  struct Host {
    int processes = 0;
    int64_t need_bytes = 0;
    int64_t limit_bytes = 0;
    std::string limit_name;
  };
  std::map<std::string, Host> hosts;
  for (const std::string& text : texts) {
    std::map<std::string, std::string> record = Split(text);
    int64_t need_bytes = 0, limit_bytes = 0;
    if (!absl::SimpleAtoi(record["need"], &need_bytes) ||
        !absl::SimpleAtoi(record["limit"], &limit_bytes)) {
      return absl::InternalError("a rank sent no need of host memory");
    }
    Host& host = hosts[record["host"]];
    ++host.processes;
    host.need_bytes += need_bytes;
    if (limit_bytes > 0 && (host.limit_bytes == 0 || limit_bytes < host.limit_bytes)) {
      host.limit_bytes = limit_bytes;
      host.limit_name = record["name"];
    }
  }
  for (const auto& [name, host] : hosts) {
    if (host.limit_bytes > 0 && host.need_bytes > host.limit_bytes) {
      return TooMuch(hosts.size() > 1 ? name : "", host.processes, host.need_bytes,
                     host.limit_bytes, host.limit_name);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckHostMemory(const HostMemoryNeed& need, int processes) {
  if (need.limit_bytes == 0 || need.need_bytes <= need.limit_bytes / processes) {
    return absl::OkStatus();
  }
  return TooMuch("", processes, need.need_bytes * processes, need.limit_bytes, need.limit_name);
}

}  // namespace dlo
