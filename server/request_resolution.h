// From a client's request to one that can run: every default applied, every wrong field named.
//
//   std::vector<FieldViolation> wrong = ResolveRequest(card, request, &spec);
//
// Stateless; any thread.
#pragma once

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "dlo/v1/video_generation.pb.h"
#include "models/model_card.h"

namespace dlo {

// A request as it will run.
struct JobSpec {
  std::string id;
  bool id_is_random = false;  // nobody else can have it
  std::string prompt;
  std::string negative_prompt;
  VideoSettings settings;
  v1::OutputFormat output_format = v1::OUTPUT_FORMAT_MP4;
  bool trace = false;
  absl::Time create_time;
  absl::Time deadline = absl::InfiniteFuture();  // the client's
};

// Fills `spec` except its times. Returns every wrong field; empty: the request can run. An empty
// request_id becomes a UUID and an unset seed a random one.
std::vector<FieldViolation> ResolveRequest(const ModelCard& card,
                                           const v1::GenerateRequest& request, JobSpec* spec);

// A random (version 4) UUID.
std::string RandomUuid();

}  // namespace dlo
