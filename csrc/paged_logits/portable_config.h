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

// One warp's stage: 32 tokens' values, their scales (or, where these are interleaved, those of their whole block), and
// which halves are absent.
template <CacheFormat kFormat, int kHeadDim>
struct PortableStage {
  static constexpr bool kFp8 = kFormat == CacheFormat::kFp8;
  static constexpr int kScaleBytes = kFp8 ? 4 : kHeadDim / 32;       // of a token
  static constexpr int kInterleavedChunks = 128 * kScaleBytes / 16;  // of 16 bytes
  static constexpr int kScales = kTileTokens * (kFp8 ? kHeadDim : kHeadDim / 2);
  static constexpr int kAbsent = kScales + (kFp8 ? kTileTokens : 128) * kScaleBytes;
  static constexpr int kBytes = kAbsent + 16;  // keeps the next stage 16-byte aligned
};

// How a launch uses a block's shared memory: q operands and weights of `slots` query slots, then `stages` stages for
// each of `warps` warps.
struct PortablePlan {
  int slots;
  int passes;  // over a request's tiles, for all its slots
  int warps;
  int stages;
  int ring;  // where the stages begin
  int shared_bytes;
};

// q operands, weights and exponents of one slot. Operands are kept as half (2 bytes an element) unless the matrix unit
// takes FP8's e4m3; 8 heads take at least one 16-byte vector in each lane.
constexpr int portable_slot_bytes(int64_t heads, int64_t head_dim, CacheFormat format, int operand_bytes) {
  const int64_t head_tile = 8 * head_dim * operand_bytes < 512 ? 512 : 8 * head_dim * operand_bytes;
  const int64_t weight_bytes = heads * static_cast<int64_t>(sizeof(float));
  const int64_t exponent_bytes = format == CacheFormat::kFp8 ? 0 : weight_bytes + 16;
  return static_cast<int>(heads / 8 * head_tile + weight_bytes + exponent_bytes);
}

// The most warps that leave room for the slots a pass should hold. Two stages keep one tile's copies under way while
// the other is scored; slots go down only when not even four warps fit beside them.
constexpr PortablePlan portable_plan(int64_t next_n, int64_t heads, int64_t head_dim, CacheFormat format,
                                     int stage_bytes, int operand_bytes, int shared_limit) {
  const int slot_bytes = portable_slot_bytes(heads, head_dim, format, operand_bytes);
  for (int slots = static_cast<int>(next_n); slots >= 1; --slots) {
    for (int warps = kPortableMaxWarps; warps >= 4; warps /= 2) {
      for (int stages = 2; stages >= 1; --stages) {
        const int bytes = slots * slot_bytes + warps * stages * stage_bytes;
        if (bytes <= shared_limit) {
          return {slots, static_cast<int>((next_n + slots - 1) / slots), warps, stages, slots * slot_bytes, bytes};
        }
      }
    }
  }
  return {};
}

}  // namespace mqa::paged_logits
