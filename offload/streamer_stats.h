// What streaming moved, how long that took, and how much of it the computing had to wait for.
//
// The computing waits for a visit from when it is due (the visit before has been computed and
// whatever lies between two visits, too) until its block is in a slot. From then on the fill and
// the delivery of the visit have nothing else to wait for, so each instant of the waiting belongs
// to the fill until it is done, and to the delivery after it. The three stalls add up to the time
// by which streaming prolonged the computing.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/time/time.h"

namespace dlo {

struct StreamerStats {
  int64_t visits = 0;
  int64_t packed_bytes = 0;  // from pages into staging buffers
  int64_t bus_bytes = 0;     // host to device
  int64_t fabric_bytes = 0;  // received from other ranks

  // How long the moves took, without their own waiting for buffers and slots. A gather's time
  // includes that in which it waited for other ranks.
  absl::Duration pack_time;
  absl::Duration copy_time;
  absl::Duration gather_time;

  // How long the computing waited for them.
  absl::Duration pack_stall;
  absl::Duration copy_stall;
  absl::Duration gather_stall;

  absl::Duration stall() const { return pack_stall + copy_stall + gather_stall; }

  // Of the time that streaming would take on its own (that of the kind of move which takes longest,
  // since kinds overlap), the share for which the computing did not wait: 1 - stall / longest, from
  // 0 to 1; 1 if nothing was moved.
  double hidden_ratio() const {
    const absl::Duration longest = std::max({pack_time, copy_time, gather_time});
    if (longest <= absl::ZeroDuration()) return 1;
    return std::clamp(1 - absl::FDivDuration(stall(), longest), 0.0, 1.0);
  }

  StreamerStats& operator+=(const StreamerStats& other) {
    visits += other.visits;
    packed_bytes += other.packed_bytes;
    bus_bytes += other.bus_bytes;
    fabric_bytes += other.fabric_bytes;
    pack_time += other.pack_time;
    copy_time += other.copy_time;
    gather_time += other.gather_time;
    pack_stall += other.pack_stall;
    copy_stall += other.copy_stall;
    gather_stall += other.gather_stall;
    return *this;
  }
};

}  // namespace dlo
