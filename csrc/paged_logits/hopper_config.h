// Shapes of the Hopper kernel: roles, shared memory and what fits. Nothing is executed here but arithmetic.
#pragma once

#include "paged_logits/params.h"

namespace mqa::paged_logits {

constexpr int kMatrixRows = 64;  // tokens that a matrix instruction takes

// Tokens that the producer fetches, and a group scores, at a time. Half the bytes per token: twice the tokens, or what
// a tile costs beside its tokens is felt.
template <CacheFormat kFormat, int kHeadDim>
struct HopperTile {
  static constexpr bool kFp8 = kFormat == CacheFormat::kFp8;
  static constexpr int kTokens = kFp8 ? kMatrixRows : 2 * kMatrixRows;
  static constexpr int kShift = kFp8 ? 6 : 7;                         // log2(kTokens)
  static constexpr int kValueBytes = kFp8 ? kHeadDim : kHeadDim / 2;  // of a token
  static constexpr int kScaleBytes = kFp8 ? 4 : kHeadDim / 32;        // of a token
  // Of a tile in shared memory. FP8's scales lie elsewhere: the swizzle of its values goes by address. MXFP4's lie
  // behind the values of their page, as in the cache.
  static constexpr int kBytes = kTokens * (kValueBytes + (kFp8 ? 0 : kScaleBytes));
};

// A block is groups of four warps that score, and one group of helpers. The register counts are what the groups change
// to at the start.
constexpr int kGroupThreads = 128;
enum Helper { kProducer, kQueryLoader, kWeightLoader, kFiller };  // a warp each

// How many groups score, and how many blocks a multiprocessor takes, by what a lane holds: two blocks where they fit,
// so that the set-up of the next kernel overlaps this one; four groups leave weights in shared memory and serve any
// number of sets of slots.
template <int kGroups, int kBlocks>
struct HopperTeam;
template <>
struct HopperTeam<2, 2> {
  static constexpr int kConsumerRegisters = 96, kHelperRegisters = 48;
};
template <>
struct HopperTeam<2, 1> {
  static constexpr int kConsumerRegisters = 224, kHelperRegisters = 56;
};
template <>
struct HopperTeam<3, 1> {
  static constexpr int kConsumerRegisters = 152, kHelperRegisters = 56;
};
template <>
struct HopperTeam<4, 1> {
  static constexpr int kConsumerRegisters = 104, kHelperRegisters = 64;
};

constexpr int kBurst = 4;  // tiles whose copies the producer starts together
constexpr int kJobs = 8;   // that the producer may be ahead of the loaders
constexpr int kMaxSlots = 16;
constexpr int kMaxStages = 24;  // more in flight do not read faster

// Tiles of one request, in a row; negative tiles: no more jobs. 16 bytes in shared memory.
struct Job {
  int request, first_tile, tiles;
};

// Byte offsets in a block's dynamic shared memory, which starts 1024-byte aligned: the swizzle of both matrices goes by
// address. Values of K are at 0.
struct HopperPlan {
  int stages;        // tiles of K
  int query_stages;  // requests' q, weights, limits and jobs
  int query_bytes;   // of one request's q
  int queries, scales, weights, limits, powers, jobs, absent, barriers;
  int shared_bytes;
  bool query_boxes;  // q can be fetched by the copy engine
  bool guesses;      // there is time for a guess before the kernel in front has finished
};

constexpr int align_up(int bytes, int alignment) { return (bytes + alignment - 1) / alignment * alignment; }

template <typename Tile>
constexpr HopperPlan hopper_plan_with(int slots, int heads, int head_dim, int stages, int query_stages) {
  HopperPlan plan{stages, query_stages, align_up(slots * heads * head_dim, 1024)};
  int at = align_up(stages * Tile::kBytes, 1024);
  plan.queries = at;
  at += query_stages * plan.query_bytes;
  plan.scales = at;
  if (Tile::kFp8) at += stages * Tile::kTokens * 4;
  plan.weights = at;
  at += query_stages * slots * (heads < 16 ? 16 : heads) * 4;
  plan.limits = at;
  at += query_stages * kMaxSlots * 4;
  plan.powers = at;
  if (!Tile::kFp8) at += query_stages * kMaxSlots * 4;
  plan.jobs = at;
  at += (kJobs + query_stages) * 16;
  plan.absent = at;
  at += stages * 4;
  plan.barriers = at = align_up(at, 8);
  at += (2 * stages + 2 * query_stages + 2 * kJobs) * 8;
  plan.shared_bytes = at;
  return plan;
}

// The most stages that fit; two query stages where they leave enough of them; .stages is 0 where not even one does.
// A burst must fit, and a stage belongs to the same groups for good: they must see every phase of its barriers.
template <typename Tile>
constexpr HopperPlan hopper_plan(int slots, int heads, int head_dim, int groups, int shared_limit) {
  for (int query_stages = 2; query_stages >= 1; --query_stages) {
    for (int stages = kMaxStages / groups * groups; stages > kBurst; stages -= groups) {
      const HopperPlan plan = hopper_plan_with<Tile>(slots, heads, head_dim, stages, query_stages);
      if (plan.shared_bytes <= shared_limit) return plan;
    }
  }
  return {};
}

}  // namespace mqa::paged_logits
