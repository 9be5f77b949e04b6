// The Hopper kernel's launch.
#pragma once

#include "common/stable.h"
#include "paged_logits/params.h"

namespace mqa::paged_logits {

// False, and nothing launched, where the Hopper kernel does not serve: on another GPU or in a build without sm_90a,
// where the queries of one request leave too little shared memory, and for pools that the copy engine cannot describe.
// The choice goes by device, shapes and strides alone. `device` is the current device; `anchor` is a tensor on it.
bool launch_hopper_fp8(LogitsParams p, const Tensor& anchor, int device);
bool launch_hopper_mxfp4(LogitsParams p, const Tensor& anchor, int device);

}  // namespace mqa::paged_logits
