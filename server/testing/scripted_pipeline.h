// A VideoPipeline for the tests of everything around it: no model; the prompt says what happens.
//
//   "steps_ms=20"        each step takes so long (0 by default)
//   "hold_step=2:/path"  after step 2 waits until /path exists, or for the cancellation
//   "hold_text:/path"    the same before the first step
//   "hold_decode:/path"  the same before the first frame
//   "visits=6"           each step visits so many streamed blocks, after an AllGather each
//   "visit_ms=20"        each visit takes so long
//   "hold_visit=8:/path" waits in that visit of the wave, as above; /path.held tells that it does
//   "hold_gather=8:/path" the same in the AllGather before it
//   "signal=9"           raises the signal after the first step
//   "exit=7"             exits with the code after the first step
//   "oom", "fail"        returns RESOURCE_EXHAUSTED, INTERNAL after the first step
//   "throw"              throws std::bad_alloc out of Generate
//   "streams"            reports that its denoising streamed weights
//   "nan"                the frames hold a NaN, which the encoder refuses
//
// Each video streams 1000 bytes over the bus. Visits and gathers are only notes in the flight
// recorder. Words that are none of these are ignored. The frames show a ramp that depends on the
// seed.
#pragma once

#include <memory>

#include "base/flight_recorder.h"
#include "models/video_pipeline.h"

namespace dlo {

std::unique_ptr<VideoPipeline> NewScriptedPipeline(FlightRecorder* recorder);

}  // namespace dlo
