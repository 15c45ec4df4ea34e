#include "client/generate.h"

#include <grpcpp/client_context.h>

#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/job_text.h"
#include "client/jobs.h"
#include "client/output_file.h"
#include "client/progress_bar.h"
#include "client/rpc.h"
#include "dlo/v1/video_generation.grpc.pb.h"
#include "media/video_reader.h"
#include "media/video_writer.h"

namespace dlo {
namespace {

// Takes the events of one request in turn.
class EventSink {
 public:
  EventSink(OutputFile* file, ProgressBar* bar) : file_(*file), progress_(bar) {}

  absl::Status Take(const v1::GenerateEvent& event) {
    switch (event.event_case()) {
      case v1::GenerateEvent::kJob:
        id_ = event.job().id();
        if (event.job().has_result()) result_ = event.job().result();
        progress_.TakeJob(event.job());
        return absl::OkStatus();
      case v1::GenerateEvent::kProgress:
        progress_.TakeProgress(event.progress());
        return absl::OkStatus();
      case v1::GenerateEvent::kChunk:
        return TakeChunk(event.chunk());
      case v1::GenerateEvent::EVENT_NOT_SET:
        return absl::OkStatus();  // an event of a later version
    }
    return absl::OkStatus();
  }

  // After the last event: puts the file in place.
  absl::Status Commit() {
    if (!result_.has_value()) {
      return absl::InternalError("the server ended the request without a result");
    }
    if (result_->size_bytes() != file_.size_bytes()) {
      return absl::DataLossError(absl::StrCat("received ", file_.size_bytes(), " of the ",
                                              result_->size_bytes(), " bytes of the video"));
    }
    return file_.Commit(result_->sha256());
  }

  const std::string& id() const { return id_; }
  const std::optional<v1::Result>& result() const { return result_; }

 private:
  absl::Status TakeChunk(const v1::ResultChunk& chunk) {
    if (chunk.offset() != file_.size_bytes()) {
      return absl::DataLossError(absl::StrCat("received bytes from ", chunk.offset(),
                                              " where those from ", file_.size_bytes(),
                                              " were due"));
    }
    RETURN_IF_ERROR(file_.Write(chunk.data()));
    progress_.TakeReceived(file_.size_bytes());
    return absl::OkStatus();
  }

  OutputFile& file_;
  JobProgress progress_;
  std::string id_;
  std::optional<v1::Result> result_;
};

absl::Status RunCall(const GenerateOptions& options, const v1::GenerateRequest& request,
                     Interrupt& interrupt, EventSink& sink) {
  auto stub = v1::VideoGeneration::NewStub(OpenChannel(options.endpoint));
  grpc::ClientContext context;
  if (options.timeout != absl::InfiniteDuration()) {
    context.set_deadline(absl::ToChronoTime(absl::Now() + options.timeout));
  }
  interrupt.Subscribe([&context] { context.TryCancel(); });
  absl::Cleanup unsubscribe = [&] { interrupt.Unsubscribe(); };

  CallContext call{.endpoint = options.endpoint, .timeout = options.timeout};
  auto reader = stub->Generate(&context, request);
  v1::GenerateEvent event;
  absl::Status ours;
  while (ours.ok() && reader->Read(&event)) {
    call.answered = true;
    ours = sink.Take(event);
  }
  if (!ours.ok()) context.TryCancel();
  const grpc::Status theirs = reader->Finish();
  RETURN_IF_ERROR(ours);
  if (interrupt.signal() != 0 && !theirs.ok()) {
    return absl::CancelledError("interrupted; the request was cancelled");
  }
  return DescribeError(theirs, call);
}

// One frame in memory at a time.
absl::Status MakeContactSheet(const std::filesystem::path& mp4, OutputFile& file) {
  std::ifstream stream(mp4, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(stream)),
                          std::istreambuf_iterator<char>());
  ASSIGN_OR_RETURN(std::unique_ptr<VideoReader> reader, VideoReader::Open(bytes));
  const VideoInfo& info = reader->info();
  ASSIGN_OR_RETURN(std::unique_ptr<VideoWriter> sheet,
                   VideoWriter::Create({.format = VideoFormat::kPngSheet,
                                        .width = info.width,
                                        .height = info.height,
                                        .num_frames = info.num_frames}));
  std::vector<float> frame(info.frame_values());
  for (;;) {
    ASSIGN_OR_RETURN(const bool more, reader->Next(absl::MakeSpan(frame)));
    if (!more) break;
    RETURN_IF_ERROR(sheet->Append(frame));
  }
  ASSIGN_OR_RETURN(const EncodedVideo png, sheet->Finish());
  RETURN_IF_ERROR(file.Write(png.bytes));
  return file.Commit(png.sha256);
}

absl::StatusOr<std::optional<OutputFile>> CreateContactSheet(const GenerateOptions& options,
                                                             VideoFormat format) {
  if (options.contact_sheet.empty()) return std::nullopt;
  absl::StatusOr<VideoFormat> sheet_format = FormatOfPath(options.contact_sheet);
  if (!sheet_format.ok() || *sheet_format != VideoFormat::kPngSheet) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--contact-sheet ", options.contact_sheet.string(), ": the file's ending must be .png"));
  }
  if (format != VideoFormat::kMp4) {
    return absl::InvalidArgumentError(
        "--contact-sheet is made from an MP4: let --output end in .mp4");
  }
  ASSIGN_OR_RETURN(OutputFile file, OutputFile::Create(options.contact_sheet));
  return file;
}

}  // namespace

absl::Status Generate(const GenerateOptions& options, const Console& console,
                      Interrupt& interrupt) {
  ASSIGN_OR_RETURN(const VideoFormat format, FormatOfPath(options.output));
  // Both before the request: an unwritable folder is not found out after minutes of work.
  ASSIGN_OR_RETURN(OutputFile file, OutputFile::Create(options.output));
  ASSIGN_OR_RETURN(std::optional<OutputFile> sheet, CreateContactSheet(options, format));
  std::optional<OutputFile> timeline;
  if (!options.timeline.empty()) {
    ASSIGN_OR_RETURN(OutputFile created, OutputFile::Create(options.timeline));
    timeline.emplace(std::move(created));
  }

  v1::GenerateRequest request = options.request;
  request.set_trace(timeline.has_value());
  request.set_output_format(ToProto(format));
  ProgressBar bar(console, options.quiet);
  EventSink sink(&file, &bar);
  RETURN_IF_ERROR(RunCall(options, request, interrupt, sink));
  RETURN_IF_ERROR(sink.Commit());
  if (sheet.has_value()) {
    if (absl::Status status = MakeContactSheet(options.output, *sheet); !status.ok()) {
      return absl::Status(
          status.code(),
          absl::StrCat(options.output.string(),
                       " is complete, but its contact sheet cannot be made: ", status.message()));
    }
  }
  if (timeline.has_value()) {
    if (absl::Status status = FetchTimeline(options.endpoint, sink.id(), interrupt, *timeline);
        !status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat(options.output.string(),
                                       " is complete, but not its timeline: ", status.message()));
    }
  }
  bar.Note(absl::StrCat("done in ", DescribeTimes(sink.result()->times()), ", ",
                        HumanBytes(file.size_bytes())));
  if (const std::string streaming = DescribeStreaming(*sink.result()); !streaming.empty()) {
    bar.Note(absl::StrCat("streamed ", streaming));
  }
  if (options.quiet) return absl::OkStatus();
  *console.out << options.output.string() << "\n";
  if (sheet.has_value()) *console.out << options.contact_sheet.string() << "\n";
  if (timeline.has_value()) *console.out << options.timeline.string() << "\n";
  console.out->flush();
  return absl::OkStatus();
}

}  // namespace dlo
