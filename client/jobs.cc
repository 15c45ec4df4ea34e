#include "client/jobs.h"

#include <grpcpp/client_context.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "client/job_text.h"
#include "client/output_file.h"
#include "client/progress_bar.h"
#include "client/rpc.h"
#include "dlo/v1/video_generation.grpc.pb.h"

namespace dlo {
namespace {

constexpr int kPageSizeMax = 1000;
// Of a download, in a row, without a byte in between.
constexpr int kBrokenCallsMax = 5;
constexpr absl::Duration kRetryDelay = absl::Milliseconds(200);

using Stub = v1::VideoGeneration::Stub;

std::unique_ptr<Stub> NewStub(const std::string& endpoint) {
  return v1::VideoGeneration::NewStub(OpenChannel(endpoint));
}

absl::Status Interrupted() { return absl::CancelledError("interrupted; the job is left as it is"); }

// A call with one answer.
template <typename Request, typename Response>
absl::Status Call(const std::string& endpoint, Interrupt& interrupt,
                  grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                  const Request& request, Response* response) {
  const std::unique_ptr<Stub> stub = NewStub(endpoint);
  grpc::ClientContext context;
  interrupt.Subscribe([&context] { context.TryCancel(); });
  absl::Cleanup unsubscribe = [&] { interrupt.Unsubscribe(); };
  const grpc::Status status = (stub.get()->*method)(&context, request, response);
  if (interrupt.signal() != 0 && !status.ok()) return Interrupted();
  return DescribeError(status, {.endpoint = endpoint});
}

absl::StatusOr<v1::Job> FetchJob(const JobOptions& options, Interrupt& interrupt) {
  v1::GetJobRequest request;
  request.set_id(options.id);
  v1::Job job;
  RETURN_IF_ERROR(Call(options.endpoint, interrupt, &Stub::GetJob, request, &job));
  return job;
}

// How a job that has ended ends the command.
absl::Status OutcomeOf(const v1::Job& job) {
  switch (job.state()) {
    case v1::JOB_STATE_SUCCEEDED:
      return absl::OkStatus();
    case v1::JOB_STATE_CANCELLED:
      return absl::CancelledError(absl::StrCat("job ", OneLine(job.id()), " was cancelled"));
    case v1::JOB_STATE_FAILED:
      return absl::Status(static_cast<absl::StatusCode>(std::max(1, job.failure().code())),
                          absl::StrCat("job ", OneLine(job.id()), " ", DescribeState(job)));
    default:
      return absl::InternalError("the server ended the call before the job's end");
  }
}

// One DownloadResult call from where the file ends.
grpc::Status DownloadOn(Stub& stub, const std::string& id, Interrupt& interrupt, OutputFile& file,
                        JobProgress& progress, absl::Status* ours) {
  v1::DownloadResultRequest request;
  request.set_id(id);
  request.set_offset(file.size_bytes());
  grpc::ClientContext context;
  interrupt.Subscribe([&context] { context.TryCancel(); });
  absl::Cleanup unsubscribe = [&] { interrupt.Unsubscribe(); };
  const auto reader = stub.DownloadResult(&context, request);
  v1::ResultChunk chunk;
  while (ours->ok() && reader->Read(&chunk)) {
    if (chunk.offset() != file.size_bytes()) {
      *ours =
          absl::DataLossError(absl::StrCat("received bytes from ", chunk.offset(),
                                           " where those from ", file.size_bytes(), " were due"));
    } else {
      *ours = file.Write(chunk.data());
      progress.TakeReceived(file.size_bytes());
    }
  }
  if (!ours->ok()) context.TryCancel();
  return reader->Finish();
}

// Leaves what was received for the next download; `why` it broke off.
absl::Status KeptFor(OutputFile& file, const absl::Status& why) {
  if (file.size_bytes() == 0) return why;
  const std::string kept =
      absl::StrCat(" (", HumanBytes(file.size_bytes()), " are kept in ", file.temporary().string(),
                   "; the same command goes on there)");
  file.Keep();
  return absl::Status(why.code(), absl::StrCat(why.message(), kept));
}

}  // namespace

absl::Status SubmitJob(const SubmitOptions& options, const Console& console, Interrupt& interrupt) {
  v1::Job job;
  RETURN_IF_ERROR(Call(options.endpoint, interrupt, &Stub::SubmitJob, options.request, &job));
  if (options.request.validate_only()) {
    *console.out << DescribeSettings(job.settings()) << "\n"
                 << DescribeForecast(job.forecast()) << std::endl;
  } else {
    *console.out << OneLine(job.id()) << std::endl;
  }
  return absl::OkStatus();
}

absl::Status GetJob(const JobOptions& options, const Console& console, Interrupt& interrupt) {
  ASSIGN_OR_RETURN(const v1::Job job, FetchJob(options, interrupt));
  *console.out << DescribeJob(job) << std::flush;
  return absl::OkStatus();
}

absl::Status ListJobs(const ListOptions& options, const Console& console, Interrupt& interrupt) {
  v1::ListJobsRequest request;
  for (const v1::JobState state : options.states) request.add_states(state);
  int left = options.limit;
  do {
    request.set_page_size(options.limit == 0 ? kPageSizeMax : std::min(left, kPageSizeMax));
    v1::ListJobsResponse response;
    RETURN_IF_ERROR(Call(options.endpoint, interrupt, &Stub::ListJobs, request, &response));
    for (const v1::Job& job : response.jobs()) *console.out << JobLine(job) << "\n";
    left -= response.jobs_size();
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty() && (options.limit == 0 || left > 0));
  console.out->flush();
  return absl::OkStatus();
}

absl::Status WatchJob(const JobOptions& options, const Console& console, Interrupt& interrupt) {
  const std::unique_ptr<Stub> stub = NewStub(options.endpoint);
  v1::WatchJobRequest request;
  request.set_id(options.id);
  grpc::ClientContext context;
  interrupt.Subscribe([&context] { context.TryCancel(); });
  absl::Cleanup unsubscribe = [&] { interrupt.Unsubscribe(); };

  CallContext call{.endpoint = options.endpoint};
  ProgressBar bar(console, options.quiet);
  JobProgress progress(&bar);
  v1::Job last;
  v1::GenerateEvent event;
  const auto reader = stub->WatchJob(&context, request);
  while (reader->Read(&event)) {
    call.answered = true;
    if (event.has_job()) {
      last = event.job();
      progress.TakeJob(last);
    } else if (event.has_progress()) {
      progress.TakeProgress(event.progress());
    }
  }
  const grpc::Status status = reader->Finish();
  if (interrupt.signal() != 0 && !status.ok()) return Interrupted();
  RETURN_IF_ERROR(DescribeError(status, call));
  RETURN_IF_ERROR(OutcomeOf(last));
  bar.Note(absl::StrCat("done in ", DescribeTimes(last.result().times()), ", ",
                        HumanBytes(last.result().size_bytes())));
  if (const std::string streaming = DescribeStreaming(last.result()); !streaming.empty()) {
    bar.Note(absl::StrCat("streamed ", streaming));
  }
  return absl::OkStatus();
}

absl::Status DownloadResult(const JobOptions& options, const Console& console,
                            Interrupt& interrupt) {
  ASSIGN_OR_RETURN(const VideoFormat format, FormatOfPath(options.output));
  ASSIGN_OR_RETURN(const v1::Job job, FetchJob(options, interrupt));
  if (job.has_result() && job.result().media_type() != VideoMediaType(format)) {
    return absl::InvalidArgumentError(absl::StrCat("--output ", options.output.string(),
                                                   ": the job's result is ",
                                                   OneLine(job.result().media_type())));
  }
  ASSIGN_OR_RETURN(OutputFile file, OutputFile::Resume(options.output, job.result().sha256(),
                                                       job.result().size_bytes()));
  std::optional<OutputFile> timeline;
  if (!options.timeline.empty()) {
    ASSIGN_OR_RETURN(OutputFile created, OutputFile::Create(options.timeline));
    timeline.emplace(std::move(created));
  }
  const std::unique_ptr<Stub> stub = NewStub(options.endpoint);
  ProgressBar bar(console, options.quiet);
  JobProgress progress(&bar);
  for (int broken_calls = 0;;) {
    const int64_t before = file.size_bytes();
    absl::Status ours;
    const grpc::Status status = DownloadOn(*stub, options.id, interrupt, file, progress, &ours);
    if (absl::IsDataLoss(ours)) return ours;
    if (!ours.ok()) return KeptFor(file, ours);
    if (status.ok()) break;
    if (interrupt.signal() != 0) return KeptFor(file, absl::CancelledError("interrupted"));
    broken_calls = file.size_bytes() > before ? 1 : broken_calls + 1;
    if (status.error_code() != grpc::StatusCode::UNAVAILABLE || broken_calls >= kBrokenCallsMax) {
      return KeptFor(file, DescribeError(status, {.endpoint = options.endpoint, .answered = true}));
    }
    interrupt.WaitFor(kRetryDelay);
  }
  if (file.size_bytes() != job.result().size_bytes()) {
    return absl::DataLossError(absl::StrCat("received ", file.size_bytes(), " of the ",
                                            job.result().size_bytes(), " bytes of the video"));
  }
  RETURN_IF_ERROR(file.Commit(job.result().sha256()));
  bar.Clear();
  if (!options.quiet) *console.out << options.output.string() << std::endl;
  if (!timeline.has_value()) return absl::OkStatus();
  RETURN_IF_ERROR(FetchTimeline(options.endpoint, options.id, interrupt, *timeline));
  if (!options.quiet) *console.out << options.timeline.string() << std::endl;
  return absl::OkStatus();
}

absl::Status FetchTimeline(const std::string& endpoint, const std::string& id, Interrupt& interrupt,
                           OutputFile& file) {
  const std::unique_ptr<Stub> stub = NewStub(endpoint);
  v1::DownloadResultRequest request;
  request.set_id(id);
  request.set_timeline(true);
  grpc::ClientContext context;
  interrupt.Subscribe([&context] { context.TryCancel(); });
  absl::Cleanup unsubscribe = [&] { interrupt.Unsubscribe(); };
  const auto reader = stub->DownloadResult(&context, request);
  Sha256 hash;  // it has no other; the file wants one
  v1::ResultChunk chunk;
  absl::Status ours;
  while (ours.ok() && reader->Read(&chunk)) {
    hash.Update(chunk.data());
    ours = file.Write(chunk.data());
  }
  if (!ours.ok()) context.TryCancel();
  const grpc::Status status = reader->Finish();
  RETURN_IF_ERROR(ours);
  if (interrupt.signal() != 0 && !status.ok()) return absl::CancelledError("interrupted");
  RETURN_IF_ERROR(DescribeError(status, {.endpoint = endpoint, .answered = true}));
  return file.Commit(hash.Finish());
}

absl::Status CancelJob(const JobOptions& options, const Console& console, Interrupt& interrupt) {
  v1::CancelJobRequest request;
  request.set_id(options.id);
  v1::Job job;
  RETURN_IF_ERROR(Call(options.endpoint, interrupt, &Stub::CancelJob, request, &job));
  *console.out << DescribeState(job) << std::endl;
  return absl::OkStatus();
}

absl::Status DeleteJob(const JobOptions& options, const Console&, Interrupt& interrupt) {
  v1::DeleteJobRequest request;
  request.set_id(options.id);
  v1::DeleteJobResponse response;
  return Call(options.endpoint, interrupt, &Stub::DeleteJob, request, &response);
}

}  // namespace dlo
