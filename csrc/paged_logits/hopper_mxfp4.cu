// MXFP4's variants of the Hopper kernel: which serves which shape.
#include "paged_logits/hopper_launch.h"

namespace mqa::paged_logits {
namespace {

template <int kHeadDim, int kHeads, int kSlots, int kGroups, bool kOneSet = true>
bool mxfp4(LogitsParams& p, const Tensor& anchor, int device) {
  return launch<HopperMxfp4<kHeadDim, kHeads, kSlots, kGroups, kOneSet>, kGroups, 1>(p, anchor, device);
}

// A set is of as many slots as an instruction takes; where one set is not enough, sets of up to 256 columns.
template <int kHeadDim, int kHeads>
bool launch_mxfp4(LogitsParams& p, const Tensor& anchor, int device) {
  constexpr int kMost = kHeads > 64 ? 2 : 4;
  const int64_t n = p.next_n;
  if constexpr (kHeads == 128) {
    if (n == 1) return mxfp4<kHeadDim, kHeads, 1, 3>(p, anchor, device);
    if (n == 2) return mxfp4<kHeadDim, kHeads, 2, 2>(p, anchor, device);
  } else if constexpr (kHeads == 64) {
    if (n == 1) return mxfp4<kHeadDim, kHeads, 1, 4>(p, anchor, device);
    if (n == 2) return mxfp4<kHeadDim, kHeads, 2, 3>(p, anchor, device);
    if (n == 3) return mxfp4<kHeadDim, kHeads, 3, 2>(p, anchor, device);
    if (n == 4) return mxfp4<kHeadDim, kHeads, 4, 2>(p, anchor, device);
  } else {
    // A step of the second product takes 16 columns.
    if (n == 1) return mxfp4<kHeadDim, kHeads, kHeads == 8 ? 2 : 1, 4>(p, anchor, device);
    if (n == 2) return mxfp4<kHeadDim, kHeads, 2, 4>(p, anchor, device);
    if (n <= 4) return mxfp4<kHeadDim, kHeads, 4, kHeads == 32 ? 3 : 4>(p, anchor, device);
  }
  return mxfp4<kHeadDim, kHeads, kMost, kMost * kHeads == 256 ? 2 : 3, false>(p, anchor, device);
}

}  // namespace

bool launch_hopper_mxfp4(LogitsParams p, const Tensor& anchor, int device) {
  switch (p.head_dim) {
    case 64: MQA_FOR_HEADS(launch_mxfp4, 64, p, anchor, device)
    default: MQA_FOR_HEADS(launch_mxfp4, 128, p, anchor, device)
  }
}

}  // namespace mqa::paged_logits
