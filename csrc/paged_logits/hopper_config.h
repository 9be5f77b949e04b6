// Shapes of the Hopper kernel: roles, shared memory and what fits. Nothing is executed here but arithmetic.
#pragma once

#include "paged_logits/params.h"

namespace mqa::paged_logits {

constexpr int kHopperTileTokens = 64;  // rows of a matrix instruction

// Threads of a block: groups of four warps that score a tile at a time, and one group of helpers. The register counts
// are what the groups change to at the start.
constexpr int kConsumerGroups = 4;
constexpr int kGroupThreads = 128;
constexpr int kHopperThreads = (kConsumerGroups + 1) * kGroupThreads;
constexpr int kConsumerRegisters = 104;
constexpr int kHelperRegisters = 64;
enum Helper { kProducer, kQueryLoader, kWeightLoader, kFiller };  // a warp each

constexpr int kBurst = 4;  // tiles whose copies the producer starts together
constexpr int kJobs = 8;   // requests that the producer may be ahead of the loaders
constexpr int kMaxSlots = 16;

// Deep enough that a burst can wait for its stages while every group has its next tile under way: the oldest tile may
// wait for the other groups to release a query.
constexpr int kMinStages = kBurst + kConsumerGroups;
constexpr int kMaxStages = 24;  // more in flight do not read faster

// A stage belongs to one group, whose warps must see every phase of its barriers.
static_assert(kMinStages % kConsumerGroups == 0 && kMaxStages % kConsumerGroups == 0, "a stage belongs to one group");
static_assert(kJobs + 1 >= kConsumerGroups, "each group may have its next tile in a request of its own");
// What the compiler gives a thread of so large a block, in steps of 8, is all that there is to hand round.
static_assert(kGroupThreads * (kConsumerGroups * kConsumerRegisters + kHelperRegisters) <=
                  kHopperThreads * (65536 / kHopperThreads / 8 * 8),
              "raising the registers would wait for ever");

// What consumers must know of a tile, 16 bytes.
struct TileInfo {
  int request;  // negative: no more tiles
  int tile;     // of 64 tokens, in the request
  int query;    // which of the block's requests, counted from 0
  int absent;   // bit per page of the tile that does not exist
};

// Byte offsets in a block's dynamic shared memory, which starts 1024-byte aligned: the swizzle of both matrices goes by
// address. Values of K are at 0.
struct HopperPlan {
  int stages;        // tiles of K
  int query_stages;  // requests' q, weights and limits
  int query_bytes;   // of one request's q
  int queries, scales, weights, limits, infos, jobs, barriers;
  int shared_bytes;
  bool query_boxes;  // q can be fetched by the copy engine
};

constexpr int align_up(int bytes, int alignment) { return (bytes + alignment - 1) / alignment * alignment; }

constexpr HopperPlan hopper_plan_with(int next_n, int heads, int head_dim, int stages, int query_stages) {
  HopperPlan plan{stages, query_stages, align_up(next_n * heads * head_dim, 1024)};
  int at = align_up(stages * kHopperTileTokens * head_dim, 1024);
  plan.queries = at;
  at += query_stages * plan.query_bytes;
  plan.scales = at;
  at += stages * kHopperTileTokens * 4;
  plan.weights = at;
  at += query_stages * next_n * (heads < 16 ? 16 : heads) * 4;
  plan.limits = at;
  at += query_stages * kMaxSlots * 4;
  plan.infos = at;
  at += stages * static_cast<int>(sizeof(TileInfo));
  plan.jobs = at;
  at += kJobs * 4;
  plan.barriers = at;
  at += (2 * stages + 2 * query_stages + 2 * kJobs) * 8;
  plan.shared_bytes = at;
  return plan;
}

// The most stages that fit; two query stages where they leave enough of them; .stages is 0 where not even one does.
constexpr HopperPlan hopper_plan(int next_n, int heads, int head_dim, int shared_limit) {
  for (int query_stages = 2; query_stages >= 1; --query_stages) {
    for (int stages = kMaxStages; stages >= kMinStages; stages -= kConsumerGroups) {
      const HopperPlan plan = hopper_plan_with(next_n, heads, head_dim, stages, query_stages);
      if (plan.shared_bytes <= shared_limit) return plan;
    }
  }
  return {};
}

}  // namespace mqa::paged_logits
