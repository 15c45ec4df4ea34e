#include "worker/wave_runner.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "media/video_writer.h"
#include "proto/convert.h"
#include "worker/process_memory.h"

namespace dlo {
namespace {

constexpr size_t kChunkBytesMax = size_t{1} << 20;
constexpr size_t kTimelineBytesMax = size_t{3} << 20;  // gRPC's messages end at 4 MiB

constexpr char kCancelled[] = "CANCELLED";
constexpr char kOutOfMemory[] = "OUT_OF_MEMORY";
constexpr char kEncodingFailed[] = "ENCODING_FAILED";
constexpr char kWeightsChanged[] = "WEIGHTS_CHANGED";
constexpr char kGenerationFailed[] = "GENERATION_FAILED";

VideoFormat ToVideoFormat(v1::OutputFormat format) {
  switch (format) {
    case v1::OUTPUT_FORMAT_PNG_SHEET:
      return VideoFormat::kPngSheet;
    case v1::OUTPUT_FORMAT_SAFETENSORS:
      return VideoFormat::kSafetensors;
    default:
      return VideoFormat::kMp4;
  }
}

v1::JobState ToJobState(Stage stage) {
  switch (stage) {
    case Stage::kEncodingText:
      return v1::JOB_STATE_ENCODING_TEXT;
    case Stage::kDenoising:
      return v1::JOB_STATE_DENOISING;
    case Stage::kDecoding:
      return v1::JOB_STATE_DECODING;
  }
  return v1::JOB_STATE_UNSPECIFIED;
}

FlightStage ToFlightStage(Stage stage) {
  switch (stage) {
    case Stage::kEncodingText:
      return FlightStage::kText;
    case Stage::kDenoising:
      return FlightStage::kDenoise;
    case Stage::kDecoding:
      return FlightStage::kDecode;
  }
  return FlightStage::kNone;
}

v1::StageStreaming ToMessage(const StageStreaming& stage) {
  const StreamerStats& streamed = stage.streamed;
  v1::StageStreaming message;
  message.set_stage(ToJobState(stage.stage));
  message.set_visits(streamed.visits);
  message.set_bus_bytes(streamed.bus_bytes);
  message.set_fabric_bytes(streamed.fabric_bytes);
  message.set_packed_bytes(streamed.packed_bytes);
  *message.mutable_copy_stall() = ToProto(streamed.copy_stall);
  *message.mutable_gather_stall() = ToProto(streamed.gather_stall);
  *message.mutable_pack_stall() = ToProto(streamed.pack_stall);
  *message.mutable_copy_time() = ToProto(streamed.copy_time);
  *message.mutable_gather_time() = ToProto(streamed.gather_time);
  *message.mutable_pack_time() = ToProto(streamed.pack_time);
  message.set_hidden_ratio(streamed.hidden_ratio());
  return message;
}

v1::WaveFailed Failure(const absl::Status& status, const char* reason) {
  v1::WaveFailed failed;
  // The request was checked before it came here, so an argument that is refused now is not the
  // client's: frames that are not numbers.
  const bool our_fault = absl::IsInvalidArgument(status);
  failed.set_code(static_cast<int>(our_fault ? absl::StatusCode::kInternal : status.code()));
  failed.set_message(std::string(status.message()));
  if (absl::IsCancelled(status)) {
    failed.set_reason(kCancelled);
  } else if (absl::IsResourceExhausted(status)) {
    failed.set_reason(kOutOfMemory);
  } else {
    failed.set_reason(reason);
  }
  return failed;
}

}  // namespace

// Tells dlo-serve and the flight recorder of stages and steps, and hands frames to the encoder.
class WaveRunner::Observer : public GenerationObserver {
 public:
  Observer(WaveRunner* runner, uint64_t wave, int num_steps, VideoWriter* writer)
      : runner_(runner),
        recorder_(*runner->recorder_),
        wave_(wave),
        num_steps_(num_steps),
        writer_(writer) {}

  // What has begun has ended when the next begins, and has failed if nothing does.
  ~Observer() override { EndStage(/*ok=*/false); }

  void EndStage(bool ok) {
    recorder_.End(std::exchange(step_token_, {}), ok);
    recorder_.End(std::exchange(stage_token_, {}), ok);
  }

  void OnStage(Stage stage) override {
    EndStage(/*ok=*/true);
    recorder_.SetStage(ToFlightStage(stage));
    recorder_.SetStep(0);
    stage_token_ = recorder_.Begin(FlightOp::kStage);
    if (stage == Stage::kDenoising) BeginStep(1);
    stage_ = ToJobState(stage);
    runner_->stage_ = stage_;
    ++runner_->work_done_;
    Tell();
  }

  void OnStep(int step, int num_steps) override {
    recorder_.End(std::exchange(step_token_, {}), /*ok=*/true);
    if (step < num_steps) BeginStep(step + 1);
    step_ = step;
    num_steps_ = num_steps;
    runner_->step_ = step;
    ++runner_->work_done_;
    Tell();
  }

  absl::Status OnFrames(const FrameSpan& frames) override {
    encoder_status_ = writer_->Append(frames.rgb);
    ++runner_->work_done_;
    return encoder_status_;
  }

  bool cancelled() const override { return runner_->cancelled_wave_ == wave_; }

  const absl::Status& encoder_status() const { return encoder_status_; }

 private:
  void BeginStep(int step) {
    recorder_.SetStep(step);
    step_token_ = recorder_.Begin(FlightOp::kStep);
  }

  void Tell() {
    v1::FromWorker message;
    v1::WaveProgress* progress = message.mutable_progress();
    progress->set_wave_id(wave_);
    progress->set_stage(stage_);
    progress->set_step(step_);
    progress->set_num_steps(num_steps_);
    runner_->send_(std::move(message));
  }

  WaveRunner* const runner_;
  FlightRecorder& recorder_;
  FlightToken stage_token_;
  FlightToken step_token_;
  const uint64_t wave_;
  int num_steps_;
  VideoWriter* const writer_;
  v1::JobState stage_ = v1::JOB_STATE_UNSPECIFIED;
  int step_ = 0;
  absl::Status encoder_status_;
};

absl::Status WaveRunner::Run(const v1::Assignment& assignment) {
  wave_ = assignment.wave_id();
  recorder_->SetWave(wave_);
  absl::Status status;
  {
    FlightScope wave(recorder_, FlightOp::kWave);
    status = assignment.has_walk() ? Walk(assignment) : RunRequest(assignment);
    if (!status.ok()) wave.Fail();
  }
  wave_ = 0;
  recorder_->SetWave(0);
  stage_ = v1::JOB_STATE_UNSPECIFIED;
  step_ = 0;
  return status;
}

absl::Status WaveRunner::RunRequest(const v1::Assignment& assignment) {
  v1::WaveFailed failed;
  bool started = false;
  // The pipeline's exceptions stay inside it; these are the encoder's and our own.
  try {
    failed = Generate(assignment, &started);
  } catch (const std::bad_alloc&) {
    failed =
        Failure(absl::ResourceExhaustedError("the worker is out of host memory"), kOutOfMemory);
  } catch (const std::exception& error) {
    failed = Failure(absl::InternalError(error.what()), kGenerationFailed);
  }
  if (failed.code() == 0) return absl::OkStatus();
  spdlog::warn("job {}: {}: {}", assignment.request().job_id(), failed.reason(), failed.message());
  // A rank that cannot go on is lost, and with it every request of its domain.
  RETURN_IF_ERROR(pipeline_->health());
  failed.set_wave_id(assignment.wave_id());
  v1::FromWorker message;
  *message.mutable_failed() = std::move(failed);
  send_(std::move(message));
  return WalkOn(assignment, started);
}

// The neighbours' videos need this rank's weights whatever became of its own request.
absl::Status WaveRunner::WalkOn(const v1::Assignment& assignment, bool started) {
  const absl::Status status = started ? pipeline_->FinishWalk()
                                      : pipeline_->Walk(FromProto(assignment.request().settings()));
  if (status.ok()) return status;
  const absl::Status health = pipeline_->health();
  return health.ok() ? status : health;
}

absl::Status WaveRunner::Walk(const v1::Assignment& assignment) {
  RETURN_IF_ERROR(pipeline_->Walk(FromProto(assignment.walk().settings())));
  v1::FromWorker message;
  message.mutable_finished()->set_wave_id(assignment.wave_id());
  message.mutable_finished()->mutable_usage()->set_rank(rank_);
  send_(std::move(message));
  return absl::OkStatus();
}

// The failure, with code 0 if there is none. Sets `started` once the pipeline has begun the plan.
v1::WaveFailed WaveRunner::Generate(const v1::Assignment& assignment, bool* started) {
  const v1::WaveRequest& wave_request = assignment.request();
  VideoRequest request{wave_request.prompt(), wave_request.negative_prompt(),
                       FromProto(wave_request.settings()), wave_request.trace()};
  absl::StatusOr<std::unique_ptr<VideoWriter>> writer =
      VideoWriter::Create({.format = ToVideoFormat(wave_request.output_format()),
                           .width = request.settings.width,
                           .height = request.settings.height,
                           .num_frames = request.settings.num_frames,
                           .fps = request.settings.fps});
  if (!writer.ok()) return Failure(writer.status(), kEncodingFailed);

  Observer observer(this, assignment.wave_id(), request.settings.num_inference_steps,
                    writer->get());
  *started = true;
  const absl::StatusOr<GenerationStats> stats = pipeline_->Generate(request, observer);
  if (!observer.encoder_status().ok()) return Failure(observer.encoder_status(), kEncodingFailed);
  if (!stats.ok()) {
    // Only weights that are read from their files while a request runs can be lost.
    return Failure(stats.status(),
                   absl::IsDataLoss(stats.status()) ? kWeightsChanged : kGenerationFailed);
  }
  observer.EndStage(/*ok=*/true);

  const absl::Time decoded = absl::Now();
  absl::StatusOr<EncodedVideo> video = (*writer)->Finish();
  if (!video.ok()) return Failure(video.status(), kEncodingFailed);
  const absl::Duration encode_tail = absl::Now() - decoded;

  v1::FromWorker message;
  v1::WaveFinished* finished = message.mutable_finished();
  finished->set_wave_id(assignment.wave_id());
  finished->set_size_bytes(static_cast<int64_t>(video->bytes.size()));
  finished->set_sha256(video->sha256);
  finished->set_media_type(video->media_type);
  *finished->mutable_times()->mutable_text() = ToProto(stats->text);
  *finished->mutable_times()->mutable_denoise() = ToProto(stats->denoise);
  *finished->mutable_times()->mutable_decode() = ToProto(stats->decode);
  *finished->mutable_times()->mutable_encode_tail() = ToProto(encode_tail);
  finished->mutable_usage()->set_rank(rank_);
  finished->mutable_usage()->set_device_bytes_peak(stats->device_bytes_peak());
  finished->mutable_usage()->set_device_bytes_peak_text(stats->device_bytes_peak_text);
  finished->mutable_usage()->set_device_bytes_peak_denoise(stats->device_bytes_peak_denoise);
  finished->mutable_usage()->set_device_bytes_peak_decode(stats->device_bytes_peak_decode);
  finished->mutable_usage()->set_bus_bytes(stats->bus_bytes);
  finished->mutable_usage()->set_host_bytes_peak(HostBytesPeak());
  for (const StageStreaming& stage : stats->streaming) {
    *finished->mutable_usage()->add_streaming() = ToMessage(stage);
  }
  if (stats->timeline.size() <= kTimelineBytesMax) finished->set_timeline(stats->timeline);
  recorder_->SetStage(FlightStage::kSend);
  recorder_->SetStep(0);
  const FlightScope sending(recorder_, FlightOp::kSend);
  if (!SendVideo(assignment.wave_id(), video->bytes)) {
    return Failure(absl::CancelledError("cancelled while the result was sent"), kCancelled);
  }
  send_(std::move(message));
  return {};
}

bool WaveRunner::SendVideo(uint64_t wave, const std::string& bytes) {
  for (size_t offset = 0; offset < bytes.size(); offset += kChunkBytesMax) {
    if (cancelled_wave_ == wave) return false;
    v1::FromWorker message;
    message.mutable_chunk()->set_wave_id(wave);
    v1::ResultChunk* chunk = message.mutable_chunk()->mutable_chunk();
    chunk->set_offset(static_cast<int64_t>(offset));
    chunk->set_data(bytes.data() + offset, std::min(kChunkBytesMax, bytes.size() - offset));
    if (!send_(std::move(message))) return false;
  }
  return true;
}

v1::Heartbeat WaveRunner::CurrentHeartbeat() const {
  v1::Heartbeat heartbeat;
  heartbeat.set_wave_id(wave_);
  heartbeat.set_stage(stage_);
  heartbeat.set_step(step_);
  const auto visits = static_cast<uint64_t>(pipeline_->visits());
  heartbeat.set_visit(visits);
  heartbeat.set_work_done(work_done_ + visits);
  return heartbeat;
}

}  // namespace dlo
