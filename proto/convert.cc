#include "proto/convert.h"

namespace dlo {

v1::VideoSettings ToProto(const VideoSettings& settings) {
  v1::VideoSettings proto;
  proto.set_width(settings.width);
  proto.set_height(settings.height);
  proto.set_num_frames(settings.num_frames);
  proto.set_fps(settings.fps);
  proto.set_num_inference_steps(settings.num_inference_steps);
  proto.set_guidance_scale(settings.guidance_scale);
  if (settings.guidance_scale_2) proto.set_guidance_scale_2(*settings.guidance_scale_2);
  proto.set_flow_shift(settings.flow_shift);
  proto.set_solver(settings.solver);
  proto.set_seed(settings.seed);
  return proto;
}

VideoSettings FromProto(const v1::VideoSettings& proto) {
  VideoSettings settings;
  settings.width = proto.width();
  settings.height = proto.height();
  settings.num_frames = proto.num_frames();
  settings.fps = proto.fps();
  settings.num_inference_steps = proto.num_inference_steps();
  settings.guidance_scale = proto.guidance_scale();
  if (proto.has_guidance_scale_2()) settings.guidance_scale_2 = proto.guidance_scale_2();
  settings.flow_shift = proto.flow_shift();
  settings.solver = proto.solver();
  settings.seed = proto.seed();
  return settings;
}

RequestedSettings RequestedFromProto(const v1::VideoSettings& proto) {
  RequestedSettings settings;
  if (proto.has_width()) settings.width = proto.width();
  if (proto.has_height()) settings.height = proto.height();
  if (proto.has_num_frames()) settings.num_frames = proto.num_frames();
  if (proto.has_fps()) settings.fps = proto.fps();
  if (proto.has_num_inference_steps()) settings.num_inference_steps = proto.num_inference_steps();
  if (proto.has_guidance_scale()) settings.guidance_scale = proto.guidance_scale();
  if (proto.has_guidance_scale_2()) settings.guidance_scale_2 = proto.guidance_scale_2();
  if (proto.has_flow_shift()) settings.flow_shift = proto.flow_shift();
  if (proto.has_solver()) settings.solver = proto.solver();
  if (proto.has_seed()) settings.seed = proto.seed();
  return settings;
}

google::protobuf::Duration ToProto(absl::Duration duration) {
  google::protobuf::Duration proto;
  const int64_t seconds = absl::ToInt64Seconds(duration);
  proto.set_seconds(seconds);
  proto.set_nanos(
      static_cast<int32_t>(absl::ToInt64Nanoseconds(duration - absl::Seconds(seconds))));
  return proto;
}

absl::Duration FromProto(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

google::protobuf::Timestamp ToProto(absl::Time time) {
  google::protobuf::Timestamp proto;
  const int64_t seconds = absl::ToUnixSeconds(time);
  proto.set_seconds(seconds);
  proto.set_nanos(
      static_cast<int32_t>(absl::ToInt64Nanoseconds(time - absl::FromUnixSeconds(seconds))));
  return proto;
}

absl::Time FromProto(const google::protobuf::Timestamp& time) {
  return absl::FromUnixSeconds(time.seconds()) + absl::Nanoseconds(time.nanos());
}

}  // namespace dlo
