#include "models/video_pipeline.h"

#include "models/wan/wan_pipeline.h"

namespace dlo {

// One family so far; ReadWanConfig refuses the pipeline classes of others by name.
absl::StatusOr<std::unique_ptr<VideoPipeline>> LoadVideoPipeline(const PipelineOptions& options) {
  return LoadWanPipeline(options);
}

}  // namespace dlo
