#include "worker/startup_record.h"

#include <spdlog/spdlog.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "proto/convert.h"

namespace dlo {
namespace {

using hwr::Phase;

std::string Word(absl::string_view word) { return std::string(word); }

// Empty for kNone.
std::string ReasonWord(hwr::Reason reason) {
  return reason == hwr::Reason::kNone ? std::string() : Word(hwr::ReasonName(reason));
}

std::string Megabytes(int64_t bytes) {
  return absl::StrFormat("%.1f MB", static_cast<double>(bytes) / 1e6);
}

std::string Seconds(absl::Duration time) {
  return absl::StrFormat("%.3f s", absl::ToDoubleSeconds(time));
}

}  // namespace

v1::StartupRecord ToProto(const StartupReport& report) {
  const hwr::StartupRecord& record = report.record;
  v1::StartupRecord proto;
  proto.set_mode(Word(hwr::ModeName(record.mode)));
  proto.set_outcome(Word(hwr::OutcomeName(record.outcome)));
  proto.set_resolution_id(record.resolution_id);
  proto.set_recovered(record.recovered);
  proto.set_artifact(record.key);
  for (const hwr::Attempt& attempt : record.attempts) {
    v1::StartupAttempt& to = *proto.add_attempts();
    to.set_stage(Word(hwr::StageName(attempt.stage)));
    to.set_result(Word(hwr::AttemptResultName(attempt.result)));
    to.set_reason(ReasonWord(attempt.reason));
    to.set_retryable(attempt.retryable);
    to.set_next(Word(hwr::NextActionName(attempt.next)));
    to.set_message(attempt.message);
  }
  for (int i = 0; i < hwr::kNumPhases; ++i) {
    v1::StartupPhase& to = *proto.add_phases();
    to.set_phase(Word(hwr::PhaseName(static_cast<Phase>(i))));
    *to.mutable_time() = ToProto(record.phases[i]);
  }
  *proto.mutable_duration() = ToProto(report.time);
  proto.set_hashed_bytes(record.bytes_hashed);
  proto.set_read_bytes(record.bytes_read);
  proto.set_mapped_bytes(record.bytes_mapped);
  proto.set_pinned_bytes(record.bytes_pinned);
  for (const HostBacking& backing : report.components) {
    v1::HostWeights& to = *proto.add_host_weights();
    to.set_component(backing.component);
    to.set_backing(backing.backing);
    to.set_reason(backing.reason);
    to.set_message(backing.message);
  }
  const hwr::PublicationRecord& publication = record.publication;
  if (publication.outcome != hwr::PublicationOutcome::kNotAttempted) {
    v1::Publication& to = *proto.mutable_publication();
    to.set_outcome(Word(hwr::PublicationOutcomeName(publication.outcome)));
    to.set_reason(ReasonWord(publication.failure.reason));
    to.set_message(publication.failure.message);
    *to.mutable_time() = ToProto(publication.time);
    *to.mutable_waited() = ToProto(publication.waited);
    to.set_bytes(publication.bytes);
    to.set_evicted(publication.evicted);
  }
  return proto;
}

void LogStartup(const StartupReport& report) {
  const hwr::StartupRecord& record = report.record;
  std::vector<std::string> phases;
  for (int i = 0; i < hwr::kNumPhases; ++i) {
    if (record.phases[i] == absl::ZeroDuration()) continue;
    phases.push_back(
        absl::StrCat(hwr::PhaseName(static_cast<Phase>(i)), " ", Seconds(record.phases[i])));
  }
  std::string line =
      absl::StrCat(hwr::OutcomeName(record.outcome), " (", hwr::ModeName(record.mode), ") in ",
                   Seconds(report.time), phases.empty() ? "" : ": ", absl::StrJoin(phases, ", "),
                   "; ", Megabytes(record.bytes_read), " read, ", Megabytes(record.bytes_mapped),
                   " mapped, ", Megabytes(record.bytes_pinned), " in buffers");
  if (!record.key.empty()) absl::StrAppend(&line, "; artifact ", record.key.substr(0, 12));
  if (record.publication.outcome != hwr::PublicationOutcome::kNotAttempted) {
    absl::StrAppend(&line,
                    "; publication: ", hwr::PublicationOutcomeName(record.publication.outcome));
    if (record.publication.outcome == hwr::PublicationOutcome::kFailed) {
      absl::StrAppend(&line, ", ", record.publication.failure.Text());
    }
  }
  spdlog::info("host weights {}: {}", record.resolution_id, line);
}

}  // namespace dlo
