// What this process has used of the host's memory.
#pragma once

#include <cstdint>

namespace dlo {

// The largest resident set so far, in bytes (VmHWM of /proc/self/status); 0 if the system does not
// say.
int64_t HostBytesPeak();

}  // namespace dlo
