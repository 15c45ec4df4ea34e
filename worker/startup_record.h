// How a load went, for dlo-serve and for the log.
#pragma once

#include "dlo/v1/video_generation.pb.h"
#include "models/model_startup.h"

namespace dlo {

v1::StartupRecord ToProto(const StartupReport& report);

// One line. What was tried on the way is logged when it happens (loader/hwr/startup.h).
void LogStartup(const StartupReport& report);

}  // namespace dlo
