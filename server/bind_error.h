// Why a server could not listen, which gRPC tells only to its own log.
#pragma once

#include <string>

namespace dlo {

// The operating system's reason not to bind `listen` (HOST:PORT with an IPv6 host in brackets, or
// unix:/PATH), found by trying. "" if it can be bound now.
std::string FindBindError(const std::string& listen);

}  // namespace dlo
