// What this process uses of the host's memory.
#pragma once

#include <cstdint>
#include <istream>

#include "dlo/v1/worker_link.pb.h"

namespace dlo {

// The largest resident set so far, in bytes (VmHWM of /proc/self/status); 0 if the system does not
// say.
int64_t HostBytesPeak();

// Fills the host's fields of `memory` from the text of /proc/self/smaps_rollup, as far as it has
// them.
void ParseSmapsRollup(std::istream& text, v1::RankMemory* memory);

// The address range of files that are mapped read-only and shared, from the text of
// /proc/self/maps. Devices are no files.
int64_t MappedFileBytes(std::istream& text);

}  // namespace dlo
