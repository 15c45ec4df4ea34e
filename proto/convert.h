// Between the messages of the API and the C++ types of models/ and Abseil.
#pragma once

#include "absl/time/time.h"
#include "dlo/v1/video_generation.pb.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/timestamp.pb.h"
#include "models/model_card.h"

namespace dlo {

v1::VideoSettings ToProto(const VideoSettings& settings);

// The inverse of ToProto for resolved settings; a field that is unset becomes its zero.
VideoSettings FromProto(const v1::VideoSettings& settings);

// What a client asked for: only the fields that are set.
RequestedSettings RequestedFromProto(const v1::VideoSettings& settings);

google::protobuf::Duration ToProto(absl::Duration duration);
absl::Duration FromProto(const google::protobuf::Duration& duration);
google::protobuf::Timestamp ToProto(absl::Time time);
absl::Time FromProto(const google::protobuf::Timestamp& time);

}  // namespace dlo
