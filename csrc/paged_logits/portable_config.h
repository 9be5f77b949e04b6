// Shapes of the portable kernel: tiles, shared memory and what fits. Nothing is executed here but arithmetic.
#pragma once

#include "paged_logits/params.h"

namespace mqa::paged_logits {

// A warp scores 32 tokens at a time (two 16-row matrix tiles), so that each q fragment read from shared memory serves
// two matrix instructions. 16 divides every block size: half a tile never straddles two pages.
constexpr int kTileTokens = 32;
constexpr int kHalfTokens = 16;
constexpr int kTilesPerUnit = kUnitTokens / kTileTokens;
constexpr int kPortableMaxWarps = 16;

// One warp's stage: 32 tokens of e4m3 values, their scales, and which halves are absent.
template <int kHeadDim>
struct PortableStage {
  static constexpr int kScales = kTileTokens * kHeadDim;
  static constexpr int kAbsent = kScales + kTileTokens * static_cast<int>(sizeof(float));
  static constexpr int kBytes = kAbsent + 16;  // keeps the next stage 16-byte aligned
};

// How a launch uses a block's shared memory: q operands and weights of `slots` query slots, then `stages` stages for
// each of `warps` warps.
struct PortablePlan {
  int slots;
  int passes;  // over a request's tiles, for all its slots
  int warps;
  int stages;
  int shared_bytes;
};

// q operands and weights of one slot. Operands are kept as half (2 bytes an element) where the matrix unit has no e4m3
// of its own, else as e4m3; 8 heads take at least one 16-byte vector in each lane.
constexpr int portable_slot_bytes(int64_t heads, int64_t head_dim, int operand_bytes) {
  const int64_t head_tile = 8 * head_dim * operand_bytes < 512 ? 512 : 8 * head_dim * operand_bytes;
  return static_cast<int>(heads / 8 * head_tile + heads * static_cast<int64_t>(sizeof(float)));
}

// The most warps that leave room for the slots a pass should hold. Two stages keep one tile's copies under way while
// the other is scored; slots go down only when not even four warps fit beside them.
constexpr PortablePlan portable_plan(int64_t next_n, int64_t heads, int64_t head_dim, int stage_bytes,
                                     int operand_bytes, int shared_limit) {
  const int slot_bytes = portable_slot_bytes(heads, head_dim, operand_bytes);
  for (int slots = static_cast<int>(next_n); slots >= 1; --slots) {
    for (int warps = kPortableMaxWarps; warps >= 4; warps /= 2) {
      for (int stages = 2; stages >= 1; --stages) {
        const int bytes = slots * slot_bytes + warps * stages * stage_bytes;
        if (bytes <= shared_limit) {
          return {slots, static_cast<int>((next_n + slots - 1) / slots), warps, stages, bytes};
        }
      }
    }
  }
  return {0, 0, 0, 0, 0};
}

}  // namespace mqa::paged_logits
