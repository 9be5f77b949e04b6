// FP8's variants of the Hopper kernel: which serves which shape.
#include "paged_logits/hopper_launch.h"

namespace mqa::paged_logits {
namespace {

template <int kHeadDim, int kHeads, int kSlots, int kGroups, int kBlocks, bool kOneSet = true>
bool fp8(LogitsParams& p, const Tensor& anchor, int device) {
  return launch<HopperFp8<kHeadDim, kHeads, kSlots, kGroups, kOneSet>, kGroups, kBlocks>(p, anchor, device);
}
// A set is of as many slots as an instruction takes; where one set is not enough, sets of up to 128 columns.
template <int kHeadDim, int kHeads>
bool launch_fp8(LogitsParams& p, const Tensor& anchor, int device) {
  constexpr int kMost = kHeads > 32 ? 128 / kHeads : 4;
  const int64_t n = p.next_n;
  if constexpr (kHeads == 128) {
    if (n == 1) return fp8<kHeadDim, kHeads, 1, 3, 1>(p, anchor, device);
    if (n == 2) return fp8<kHeadDim, kHeads, 2, 2, 1>(p, anchor, device);
  } else if constexpr (kHeads == 64) {
    if (n == 1) return fp8<kHeadDim, kHeads, 1, 2, 2>(p, anchor, device);
    if (n == 2) return fp8<kHeadDim, kHeads, 2, 3, 1>(p, anchor, device);
    if (n == 3) return fp8<kHeadDim, kHeads, 3, 2, 1>(p, anchor, device);
    if (n == 4) return fp8<kHeadDim, kHeads, 4, 2, 1>(p, anchor, device);
  } else if constexpr (kHeads == 32) {
    if (n == 1) return fp8<kHeadDim, kHeads, 1, 2, 2>(p, anchor, device);
    if (n == 2) return fp8<kHeadDim, kHeads, 2, 2, 2>(p, anchor, device);
    if (n <= 4) return fp8<kHeadDim, kHeads, 4, 3, 1>(p, anchor, device);
  } else {
    if (n == 1) return fp8<kHeadDim, kHeads, 1, 2, 2>(p, anchor, device);
    if (n <= 4) return fp8<kHeadDim, kHeads, 4, 2, 2>(p, anchor, device);
  }
  return fp8<kHeadDim, kHeads, kMost, 4, 1, false>(p, anchor, device);
}

}  // namespace

bool launch_hopper_fp8(LogitsParams p, const Tensor& anchor, int device) {
  switch (p.head_dim) {
    case 32: MQA_FOR_HEADS(launch_fp8, 32, p, anchor, device)
    case 64: MQA_FOR_HEADS(launch_fp8, 64, p, anchor, device)
    default: MQA_FOR_HEADS(launch_fp8, 128, p, anchor, device)
  }
}

}  // namespace mqa::paged_logits
