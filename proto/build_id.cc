#include "proto/build_id.h"

namespace dlo {

std::string BuildId() { return DLO_BUILD_ID; }

}  // namespace dlo
