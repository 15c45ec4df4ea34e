// The public service: checks a request, hands it to the scheduler, and streams what happens to it.
//
//   GenerationService service(card, &scheduler);
//   builder.RegisterService(&service);
//
// Runs on gRPC's callback threads; nothing blocks one. Progress events of a client that reads
// slowly are merged, so a call holds a bounded number of events and, of its video, one chunk; the
// rest waits in its rank's result queue. `scheduler` outlives the server that the service is
// registered with.
#pragma once

#include <memory>

#include "dlo/v1/video_generation.grpc.pb.h"
#include "models/model_card.h"
#include "server/scheduler.h"

namespace dlo {

class GenerationService : public v1::VideoGeneration::CallbackService {
 public:
  GenerationService(std::shared_ptr<const ModelCard> card, Scheduler* scheduler)
      : card_(std::move(card)), scheduler_(scheduler) {}

  grpc::ServerWriteReactor<v1::GenerateEvent>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override;

 private:
  const std::shared_ptr<const ModelCard> card_;
  Scheduler* const scheduler_;
};

}  // namespace dlo
