// The public service: checks requests, hands them to the job manager, and streams what happens to
// them.
//
//   GenerationService service(card, &forecaster, &jobs, &board, metrics);
//   builder.RegisterService(&service);
//
// Runs on gRPC's callback threads; nothing blocks one. Progress events of a client that reads
// slowly are merged, so a call holds a bounded number of events and, of a video, one chunk; the
// rest of it waits on the disk. `forecaster`, `jobs` and `board` outlive the server that the
// service is registered with.
#pragma once

#include <memory>

#include "dlo/v1/video_generation.grpc.pb.h"
#include "models/model_card.h"
#include "server/forecaster.h"
#include "server/job_manager.h"
#include "server/metrics.h"
#include "server/status_board.h"

namespace dlo {

// With handlers that get a request's bytes (raw_messages.h).
using RawVideoGeneration = v1::VideoGeneration::WithRawCallbackMethod_Generate<
    v1::VideoGeneration::WithRawCallbackMethod_SubmitJob<
        v1::VideoGeneration::WithRawCallbackMethod_GetJob<
            v1::VideoGeneration::WithRawCallbackMethod_ListJobs<
                v1::VideoGeneration::WithRawCallbackMethod_WatchJob<
                    v1::VideoGeneration::WithRawCallbackMethod_DownloadResult<
                        v1::VideoGeneration::WithRawCallbackMethod_CancelJob<
                            v1::VideoGeneration::WithRawCallbackMethod_DeleteJob<
                                v1::VideoGeneration::WithRawCallbackMethod_GetStatus<
                                    v1::VideoGeneration::Service>>>>>>>>>;

class GenerationService : public RawVideoGeneration {
 public:
  GenerationService(std::shared_ptr<const ModelCard> card, const Forecaster* forecaster,
                    JobManager* jobs, const StatusBoard* board,
                    std::shared_ptr<ServerMetrics> metrics)
      : card_(std::move(card)),
        forecaster_(forecaster),
        jobs_(jobs),
        board_(board),
        metrics_(std::move(metrics)) {}

  using Unary = grpc::ServerUnaryReactor;
  using Stream = grpc::ServerWriteReactor<grpc::ByteBuffer>;
  using Context = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;

  Stream* Generate(Context* context, const Bytes* request) override;
  Unary* SubmitJob(Context* context, const Bytes* request, Bytes* job) override;
  Unary* GetJob(Context* context, const Bytes* request, Bytes* job) override;
  Unary* ListJobs(Context* context, const Bytes* request, Bytes* response) override;
  Stream* WatchJob(Context* context, const Bytes* request) override;
  Stream* DownloadResult(Context* context, const Bytes* request) override;
  Unary* CancelJob(Context* context, const Bytes* request, Bytes* job) override;
  Unary* DeleteJob(Context* context, const Bytes* request, Bytes* response) override;
  Unary* GetStatus(Context* context, const Bytes* request, Bytes* response) override;

 private:
  v1::Job ResolvedJob(const JobSpec& spec) const;
  // For a request with wrong fields.
  grpc::Status Refuse(const std::vector<FieldViolation>& wrong) const;

  const std::shared_ptr<const ModelCard> card_;
  const Forecaster* const forecaster_;
  JobManager* const jobs_;
  const StatusBoard* const board_;
  const std::shared_ptr<ServerMetrics> metrics_;
};

}  // namespace dlo
