// The public service: checks requests, hands them to the job manager, and streams what happens to
// them.
//
//   GenerationService service(card, &jobs);
//   builder.RegisterService(&service);
//
// Runs on gRPC's callback threads; nothing blocks one. Progress events of a client that reads
// slowly are merged, so a call holds a bounded number of events and, of a video, one chunk; the
// rest of it waits on the disk. `jobs` outlives the server that the service is registered with.
#pragma once

#include <memory>

#include "dlo/v1/video_generation.grpc.pb.h"
#include "models/model_card.h"
#include "server/job_manager.h"

namespace dlo {

class GenerationService : public v1::VideoGeneration::CallbackService {
 public:
  GenerationService(std::shared_ptr<const ModelCard> card, JobManager* jobs)
      : card_(std::move(card)), jobs_(jobs) {}

  grpc::ServerWriteReactor<v1::GenerateEvent>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* SubmitJob(grpc::CallbackServerContext* context,
                                      const v1::GenerateRequest* request, v1::Job* job) override;
  grpc::ServerUnaryReactor* GetJob(grpc::CallbackServerContext* context,
                                   const v1::GetJobRequest* request, v1::Job* job) override;
  grpc::ServerUnaryReactor* ListJobs(grpc::CallbackServerContext* context,
                                     const v1::ListJobsRequest* request,
                                     v1::ListJobsResponse* response) override;
  grpc::ServerWriteReactor<v1::GenerateEvent>* WatchJob(
      grpc::CallbackServerContext* context, const v1::WatchJobRequest* request) override;
  grpc::ServerWriteReactor<v1::ResultChunk>* DownloadResult(
      grpc::CallbackServerContext* context, const v1::DownloadResultRequest* request) override;
  grpc::ServerUnaryReactor* CancelJob(grpc::CallbackServerContext* context,
                                      const v1::CancelJobRequest* request, v1::Job* job) override;
  grpc::ServerUnaryReactor* DeleteJob(grpc::CallbackServerContext* context,
                                      const v1::DeleteJobRequest* request,
                                      v1::DeleteJobResponse* response) override;

 private:
  const std::shared_ptr<const ModelCard> card_;
  JobManager* const jobs_;
};

}  // namespace dlo
