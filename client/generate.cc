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
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "client/output_file.h"
#include "client/progress_bar.h"
#include "client/rpc.h"
#include "dlo/v1/video_generation.grpc.pb.h"
#include "media/video_reader.h"
#include "media/video_writer.h"

namespace dlo {
namespace {

v1::OutputFormat ToProto(VideoFormat format) {
  switch (format) {
    case VideoFormat::kMp4:
      return v1::OUTPUT_FORMAT_MP4;
    case VideoFormat::kPngSheet:
      return v1::OUTPUT_FORMAT_PNG_SHEET;
    case VideoFormat::kSafetensors:
      return v1::OUTPUT_FORMAT_SAFETENSORS;
  }
  return v1::OUTPUT_FORMAT_UNSPECIFIED;
}

std::string StageName(v1::JobState state) {
  switch (state) {
    case v1::JOB_STATE_QUEUED:
      return "queued";
    case v1::JOB_STATE_ENCODING_TEXT:
      return "encoding text";
    case v1::JOB_STATE_DENOISING:
      return "denoising";
    case v1::JOB_STATE_DECODING:
      return "decoding";
    case v1::JOB_STATE_SUCCEEDED:
      return "done";
    default:
      return "waiting";
  }
}

// "128 x 128, 17 frames at 16 fps, 30 steps, guidance 5, shift 3, unipc, seed 7".
std::string DescribeSettings(const v1::VideoSettings& s) {
  std::string line =
      absl::StrCat(s.width(), " x ", s.height(), ", ", s.num_frames(), " frames at ", s.fps(),
                   " fps, ", s.num_inference_steps(), " steps, guidance ", s.guidance_scale());
  if (s.has_guidance_scale_2()) absl::StrAppend(&line, " and ", s.guidance_scale_2());
  absl::StrAppend(&line, ", shift ", s.flow_shift(), ", ", s.solver(), ", seed ", s.seed());
  return OneLine(line);
}

// "4.31 s: queue 0.00 s, text 0.02 s, denoise 3.90 s, decode 0.31 s".
std::string DescribeTimes(const v1::StageTimes& times) {
  const std::pair<const char*, absl::Duration> stages[] = {
      {"queue", FromProto(times.queue())},        {"text", FromProto(times.text())},
      {"denoise", FromProto(times.denoise())},    {"decode", FromProto(times.decode())},
      {"encode", FromProto(times.encode_tail())},
  };
  absl::Duration total;
  std::vector<std::string> parts;
  for (const auto& [name, duration] : stages) {
    total += duration;
    parts.push_back(absl::StrCat(name, " ", HumanDuration(duration)));
  }
  return absl::StrCat(HumanDuration(total), " (", absl::StrJoin(parts, ", "), ")");
}

// Takes the events of one request in turn.
class EventSink {
 public:
  EventSink(OutputFile* file, ProgressBar* bar) : file_(*file), bar_(*bar) {}

  absl::Status Take(const v1::GenerateEvent& event) {
    switch (event.event_case()) {
      case v1::GenerateEvent::kJob:
        TakeJob(event.job());
        return absl::OkStatus();
      case v1::GenerateEvent::kProgress:
        TakeProgress(event.progress());
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

  const std::optional<v1::Result>& result() const { return result_; }

 private:
  void TakeJob(const v1::Job& job) {
    if (!settings_noted_ && job.settings().has_num_inference_steps()) {
      bar_.Note(DescribeSettings(job.settings()));
      settings_noted_ = true;
    }
    if (job.has_result()) result_ = job.result();
    if (job.state() == v1::JOB_STATE_SUCCEEDED) return;
    state_ = {.stage = StageName(job.state())};
    denoising_ = job.state() == v1::JOB_STATE_DENOISING;
    if (denoising_) state_.num_steps = job.settings().num_inference_steps();
    if (job.has_progress()) {
      TakeProgress(job.progress());
    } else {
      bar_.Update(state_);
    }
  }

  void TakeProgress(const v1::Progress& progress) {
    state_.queue_position = progress.queue_position();
    if (denoising_ && progress.num_steps() > 0) {
      state_.step = progress.step();
      state_.num_steps = progress.num_steps();
      state_.step_time = FromProto(progress.step_time());
      state_.remaining = FromProto(progress.remaining());
    }
    bar_.Update(state_);
  }

  absl::Status TakeChunk(const v1::ResultChunk& chunk) {
    if (chunk.offset() != file_.size_bytes()) {
      return absl::DataLossError(absl::StrCat("received bytes from ", chunk.offset(),
                                              " where those from ", file_.size_bytes(),
                                              " were due"));
    }
    RETURN_IF_ERROR(file_.Write(chunk.data()));
    denoising_ = false;
    state_ = {.stage = "receiving", .received_bytes = file_.size_bytes()};
    bar_.Update(state_);
    return absl::OkStatus();
  }

  OutputFile& file_;
  ProgressBar& bar_;
  ProgressState state_;
  bool denoising_ = false;
  bool settings_noted_ = false;
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

  v1::GenerateRequest request = options.request;
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
  bar.Note(absl::StrCat("done in ", DescribeTimes(sink.result()->times()), ", ",
                        HumanBytes(file.size_bytes())));
  if (options.quiet) return absl::OkStatus();
  *console.out << options.output.string() << "\n";
  if (sheet.has_value()) *console.out << options.contact_sheet.string() << "\n";
  console.out->flush();
  return absl::OkStatus();
}

}  // namespace dlo
