// The schedule kernel's launch.
#pragma once

#include "paged_logits/params.h"

namespace mqa::paged_logits {

// On the current stream of `device`, which is the current device.
void launch_schedule(const ScheduleParams& p, int device);

}  // namespace mqa::paged_logits
