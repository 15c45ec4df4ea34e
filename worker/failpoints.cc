#include "worker/failpoints.h"

#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace dlo {
namespace {

// Where a message leaves the worker; empty: at none of the places.
std::string PlaceOf(const v1::FromWorker& message) {
  switch (message.message_case()) {
    case v1::FromWorker::kReady:
      return "ready";
    case v1::FromWorker::kChunk:
      return "chunk";
    case v1::FromWorker::kFinished:
      return "finished";
    case v1::FromWorker::kProgress:
      break;
    default:
      return "";
  }
  if (message.progress().stage() == v1::JOB_STATE_ENCODING_TEXT) return "encoding";
  if (message.progress().stage() == v1::JOB_STATE_DECODING) return "decoding";
  return message.progress().step() == 0 ? "denoising" : "step";
}

void Spoil(const std::string& action, v1::FromWorker* message) {
  if (message->has_chunk()) {
    v1::ResultChunk* const chunk = message->mutable_chunk()->mutable_chunk();
    if (action == "offset") chunk->set_offset(chunk->offset() + 1);
    if (action == "flip") (*chunk->mutable_data())[0] ^= 1;
    if (action == "foreign") message->mutable_chunk()->set_wave_id(~message->chunk().wave_id());
  } else if (message->has_finished()) {
    v1::WaveFinished* const finished = message->mutable_finished();
    if (action == "size") finished->set_size_bytes(finished->size_bytes() + 1);
    if (action == "sha256") finished->set_sha256("none");
  }
}

}  // namespace

void Failpoints::OnLoading() const {
  if (folder_.empty()) return;
  std::string path;
  const std::string action = Action("loading", &path);
  if (!action.empty()) Reach("loading", action, path);
}

bool Failpoints::Send(v1::FromWorker message,
                      const std::function<bool(v1::FromWorker)>& send) const {
  if (folder_.empty()) return send(std::move(message));
  const std::string place = PlaceOf(message);
  std::string path;
  const std::string action = place.empty() ? "" : Action(place, &path);
  if (action.empty()) return send(std::move(message));
  if (action == "drop") return true;
  if (action == "twice" && !send(message)) return false;
  Spoil(action, &message);
  const bool sent = send(std::move(message));
  Reach(place, action, path);
  return sent;
}

std::string Failpoints::Action(const std::string& place, std::string* path) const {
  for (const std::string& whom : {absl::StrCat(rank_), std::string("all")}) {
    *path = absl::StrCat(folder_, "/", place, ".", whom);
    std::ifstream file(*path);
    if (file) return std::string(std::istreambuf_iterator<char>(file), {});
  }
  return "";
}

void Failpoints::Reach(const std::string& place, const std::string& action,
                       const std::string& path) const {
  if (action == "cut") shutdown(link_fd_, SHUT_RDWR);
  if (action == "garbage") {
    const std::string garbage(512, '\xAA');
    [[maybe_unused]] const ssize_t written = write(link_fd_, garbage.data(), garbage.size());
  }
  if (action != "note" && action != "hold") return;
  const std::string reached = absl::StrCat(folder_, "/reached.", place, ".", rank_);
  const std::string partial = absl::StrCat(reached, ".", getpid());
  std::ofstream(partial) << getpid();
  std::filesystem::rename(partial, reached);
  while (action == "hold" && std::filesystem::exists(path)) {
    absl::SleepFor(absl::Milliseconds(2));
  }
}

}  // namespace dlo
