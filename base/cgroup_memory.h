// What the kernel charges this process's memory cgroup with, and how far it may go.
//
//   CgroupMemory memory = ReadCgroupMemory();
//
// Any thread. Fails by NaN.
#pragma once

#include <filesystem>

namespace dlo {

struct CgroupMemory {
  double used_bytes;   // with page cache; NaN: in no memory cgroup that can be read
  double limit_bytes;  // its own, not an ancestor's; infinity: none; NaN as above
};

// Version 1 where the memory controller is there, else version 2. `root` holds proc/ and sys/.
CgroupMemory ReadCgroupMemory(const std::filesystem::path& root = "/");

}  // namespace dlo
