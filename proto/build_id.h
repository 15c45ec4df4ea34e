// What dlo-serve and dlo-worker compare before they work together.
#pragma once

#include <cstdint>
#include <string>

namespace dlo {

// Raised when the meaning of worker_link.proto changes.
inline constexpr uint32_t kLinkProtocolVersion = 4;

// Version, commit at configuration time and a digest of worker_link.proto, e.g.
// "0.1.0+b7f8ff8.3fa9c211".
std::string BuildId();

}  // namespace dlo
