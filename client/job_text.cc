#include "client/job_text.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "client/rpc.h"

namespace dlo {
namespace {

constexpr std::pair<v1::JobState, const char*> kStates[] = {
    {v1::JOB_STATE_QUEUED, "queued"},
    {v1::JOB_STATE_ADMITTED, "admitted"},
    {v1::JOB_STATE_ENCODING_TEXT, "encoding text"},
    {v1::JOB_STATE_DENOISING, "denoising"},
    {v1::JOB_STATE_DECODING, "decoding"},
    {v1::JOB_STATE_SUCCEEDED, "succeeded"},
    {v1::JOB_STATE_FAILED, "failed"},
    {v1::JOB_STATE_CANCELLED, "cancelled"},
};

std::string TimeText(const google::protobuf::Timestamp& time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::FromUnixSeconds(time.seconds()),
                          absl::UTCTimeZone());
}

}  // namespace

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

std::string StateName(v1::JobState state) {
  for (const auto& [value, name] : kStates) {
    if (value == state) return name;
  }
  return "unknown";
}

std::optional<v1::JobState> StateOfName(absl::string_view name) {
  const std::string wanted =
      absl::StrReplaceAll(absl::AsciiStrToLower(name), {{"-", " "}, {"_", " "}});
  for (const auto& [value, known] : kStates) {
    if (wanted == known) return value;
  }
  return std::nullopt;
}

std::string DescribeSettings(const v1::VideoSettings& s) {
  std::string line =
      absl::StrCat(s.width(), " x ", s.height(), ", ", s.num_frames(), " frames at ", s.fps(),
                   " fps, ", s.num_inference_steps(), " steps, guidance ", s.guidance_scale());
  if (s.has_guidance_scale_2()) absl::StrAppend(&line, " and ", s.guidance_scale_2());
  absl::StrAppend(&line, ", shift ", s.flow_shift(), ", ", s.solver(), ", seed ", s.seed());
  return OneLine(line);
}

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

std::string DescribeStreaming(const v1::Result& result) {
  int64_t bus_bytes = 0, fabric_bytes = 0;
  absl::Duration copy, gather, pack;
  double hidden_ratio = 1;
  bool any = false;
  for (const v1::RankUsage& rank : result.ranks()) {
    for (const v1::StageStreaming& stage : rank.streaming()) {
      any = true;
      bus_bytes += stage.bus_bytes();
      fabric_bytes += stage.fabric_bytes();
      copy += FromProto(stage.copy_stall());
      gather += FromProto(stage.gather_stall());
      pack += FromProto(stage.pack_stall());
      hidden_ratio = std::min(hidden_ratio, stage.hidden_ratio());
    }
  }
  if (!any) return "";
  std::vector<std::string> waits;
  for (const auto& [name, stall] :
       {std::pair("copy", copy), std::pair("gather", gather), std::pair("pack", pack)}) {
    if (stall > absl::ZeroDuration())
      waits.push_back(absl::StrCat(name, " ", HumanDuration(stall)));
  }
  std::string text = absl::StrCat(HumanBytes(bus_bytes), " over the bus");
  if (fabric_bytes > 0) absl::StrAppend(&text, ", ", HumanBytes(fabric_bytes), " between ranks");
  absl::StrAppend(&text, "; computing waited ", HumanDuration(copy + gather + pack));
  if (!waits.empty()) absl::StrAppend(&text, " (", absl::StrJoin(waits, ", "), ")");
  absl::StrAppendFormat(&text, ", %.0f %% hidden", 100 * std::floor(hidden_ratio * 100) / 100);
  return text;
}

std::string DescribeForecast(const v1::Forecast& forecast) {
  std::string text = "forecast: ";
  if (forecast.has_run_time()) {
    absl::StrAppend(&text, HumanDuration(FromProto(forecast.run_time())), " (text ",
                    HumanDuration(FromProto(forecast.times().text())), ", denoise ",
                    HumanDuration(FromProto(forecast.times().denoise())), ", decode ",
                    HumanDuration(FromProto(forecast.times().decode())), ")");
  } else {
    absl::StrAppend(&text, "time not known, as no request has run yet");
  }
  absl::StrAppendFormat(
      &text, ", %.3g TFLOP",
      (forecast.text_flops() + forecast.denoise_flops() + forecast.decode_flops()) / 1e12);
  absl::StrAppend(&text, ", transfer ", OneLine(forecast.transfer()));
  if (forecast.bus_bytes() > 0) {
    absl::StrAppend(&text, ", ", HumanBytes(forecast.bus_bytes()), " over the bus of each rank");
  }
  std::vector<std::string> runs;
  for (const v1::PlanRun& run : forecast.plan()) {
    runs.push_back(
        absl::StrCat(OneLine(run.component()), " ", run.num_blocks(), " blocks x ", run.passes()));
  }
  return absl::StrCat(text, "\nplan: ", absl::StrJoin(runs, ", then "));
}

std::string DescribeState(const v1::Job& job) {
  std::string text = StateName(job.state());
  if (job.state() == v1::JOB_STATE_QUEUED && job.progress().queue_position() > 0) {
    absl::StrAppend(&text, ", position ", job.progress().queue_position());
  } else if (job.state() == v1::JOB_STATE_DENOISING) {
    absl::StrAppend(&text, " ", job.progress().step(), "/", job.settings().num_inference_steps());
  } else if (job.has_failure()) {
    absl::StrAppend(&text, ": ", job.failure().message(), " (", job.failure().reason(), ")");
  }
  return OneLine(text);
}

std::string DescribeJob(const v1::Job& job) {
  std::string text = absl::StrCat("id: ", OneLine(job.id()), "\nstate: ", DescribeState(job),
                                  "\nsettings: ", DescribeSettings(job.settings()), "\n");
  const auto add_time = [&text](const char* name, bool has, const auto& time) {
    if (has) absl::StrAppend(&text, name, ": ", TimeText(time), "\n");
  };
  add_time("created", job.has_create_time(), job.create_time());
  add_time("started", job.has_start_time(), job.start_time());
  add_time("ended", job.has_end_time(), job.end_time());
  add_time("expires", job.has_expire_time(), job.expire_time());
  if (job.has_result()) {
    const v1::Result& result = job.result();
    absl::StrAppend(&text, "result: ", OneLine(result.media_type()), ", ",
                    HumanBytes(result.size_bytes()), "\nsha256: ", OneLine(result.sha256()),
                    "\ntimes: ", DescribeTimes(result.times()), "\n");
    if (const std::string streaming = DescribeStreaming(result); !streaming.empty()) {
      absl::StrAppend(&text, "streaming: ", streaming, "\n");
    }
    if (result.timeline_bytes() > 0) {
      absl::StrAppend(&text, "timeline: ", HumanBytes(result.timeline_bytes()), "\n");
    }
  }
  return text;
}

std::string JobLine(const v1::Job& job) {
  return absl::StrCat(OneLine(job.id()), "\t", DescribeState(job), "\t",
                      TimeText(job.create_time()), "\t", DescribeSettings(job.settings()));
}

void JobProgress::TakeJob(const v1::Job& job) {
  if (!settings_noted_ && job.settings().has_num_inference_steps()) {
    bar_.Note(DescribeSettings(job.settings()));
    settings_noted_ = true;
  }
  if (job.state() == v1::JOB_STATE_SUCCEEDED || job.state() == v1::JOB_STATE_FAILED ||
      job.state() == v1::JOB_STATE_CANCELLED) {
    return;
  }
  state_ = {.stage = StateName(job.state())};
  denoising_ = job.state() == v1::JOB_STATE_DENOISING;
  if (denoising_) state_.num_steps = job.settings().num_inference_steps();
  if (job.has_progress()) {
    TakeProgress(job.progress());
  } else {
    bar_.Update(state_);
  }
}

void JobProgress::TakeProgress(const v1::Progress& progress) {
  state_.queue_position = progress.queue_position();
  if (denoising_ && progress.num_steps() > 0) {
    state_.step = progress.step();
    state_.num_steps = progress.num_steps();
    state_.step_time = FromProto(progress.step_time());
    state_.remaining = FromProto(progress.remaining());
  }
  bar_.Update(state_);
}

void JobProgress::TakeReceived(int64_t bytes) {
  denoising_ = false;
  state_ = {.stage = "receiving", .received_bytes = bytes};
  bar_.Update(state_);
}

}  // namespace dlo
