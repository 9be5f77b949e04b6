// The Hopper kernel (sm_90a) but for what a cache format makes of it: shared memory, producer, jobs. hopper_fp8.cuh and
// hopper_mxfp4.cuh have the loaders of queries and the consumers.
//
// One block per multiprocessor (or two) takes an equal run of the tiles of all requests. A producer warp walks the run
// and fetches K by bulk copies into a ring of stages; two more warps fetch each request's q and weights one request
// ahead. Groups of four warps score tiles: wgmma with 64 tokens of K as rows and the heads of one to four query slots
// as columns, then the sum over heads. All slots share one read of K.
//
// The host asks for programmatic dependent launch: a block's set-up overlaps the end of the kernel in front, and all of
// that kernel where the two fit a multiprocessor together.
//
// Only the producer looks at lengths to find its way, and hands the rest what it found: whatever is written to the
// inputs meanwhile, nobody waits for a tile that does not come.
//
// What paid: a short way from tile to tile in the producer, which one warp can only just keep up with (each of a
// burst's stages waited for by its own lane); K marked to leave the L2 cache first, and no promotion of its reads;
// starting the copies of four tiles from as many lanes (eight start later, which small batches feel); jobs, so that a
// consumer reads nothing about a tile before its products. What did not: reading K's first tiles into the L2 cache
// ahead of the kernel in front, a second producer, clusters of 8 (half of them do not fit at once), more blocks than
// fit at once, handing out the last tiles by an atomic counter (a chunk of four takes its block 2 us to find).
//
// Bits: a score depends on its own q, K, scale and weights alone; tiles and slots only move about.
#pragma once

#include <cstdint>

#include "device/mbarrier.cuh"
#include "paged_logits/hopper_config.h"
#include "paged_logits/rows.cuh"

namespace mqa::paged_logits {

// The stage of a ring that a role has reached, and the parity of its barriers' phase.
struct RingPosition {
  int stage, parity;

  __device__ void advance(int by, int stages) {
    stage += by;
    if (stage >= stages) {
      stage -= stages;
      parity ^= 1;
    }
  }
};

// kSlots: query slots that a matrix instruction takes together, a set; the columns are their heads. kOneSet: one is all
// there is.
template <CacheFormat kFormat, int kHeadDim, int kHeads, int kSlots, int kGroups, bool kOneSet>
struct HopperBlock {
  using TileShape = HopperTile<kFormat, kHeadDim>;
  static constexpr bool kFp8 = TileShape::kFp8;
  static constexpr int kTileTokens = TileShape::kTokens;
  static constexpr int kTileShift = TileShape::kShift;
  static constexpr int kValueBytes = TileShape::kValueBytes;
  static constexpr int kScaleBytes = TileShape::kScaleBytes;
  static constexpr int kSlotsOfSet = kSlots;
  static constexpr int kColumns = kSlots * kHeads;

  const LogitsParams& p;
  const CUtensorMap& keys;     // FP8: [blocks][S][D]
  const CUtensorMap& queries;  // FP8: [B][n][H][D]
  const HopperPlan& plan;
  uint32_t shared;
  int lane;
  int sets;
  // Groups that take turns at the tiles of one set; the sets of a group are set_step apart.
  int turns, set_step;

  __device__ HopperBlock(const LogitsParams& params, const CUtensorMap& key_map, const CUtensorMap& query_map,
                         const HopperPlan& launch, const uint8_t* memory)
      : p(params),
        keys(key_map),
        queries(query_map),
        plan(launch),
        shared(device::shared_address(memory)),
        lane(static_cast<int>(threadIdx.x) % kWarpThreads),
        sets(kOneSet ? 1 : static_cast<int>(params.next_n + kSlots - 1) / kSlots),
        turns(!kFp8       ? kGroups
              : sets <= 2 ? kGroups / sets
                          : 1),
        set_step(kGroups / turns) {}

  __device__ uint32_t values(int stage) const { return shared + stage * TileShape::kBytes; }
  __device__ uint32_t scales(int stage) const { return shared + plan.scales + stage * (kTileTokens * 4); }  // FP8
  __device__ uint32_t absent(int stage) const { return shared + plan.absent + stage * 4; }  // bit per page of the tile
  __device__ uint32_t query(int stage) const { return shared + plan.queries + stage * plan.query_bytes; }
  __device__ uint32_t limits(int stage) const { return shared + plan.limits + stage * (kMaxSlots * 4); }
  __device__ uint32_t job(int slot) const { return shared + plan.jobs + slot * 16; }
  __device__ uint32_t query_job(int stage) const { return job(kJobs + stage); }

  __device__ uint32_t full(int stage) const { return shared + plan.barriers + stage * 8; }
  __device__ uint32_t empty(int stage) const { return full(plan.stages + stage); }
  __device__ uint32_t query_full(int stage) const { return full(2 * plan.stages + stage); }
  __device__ uint32_t query_empty(int stage) const { return query_full(plan.query_stages + stage); }
  __device__ uint32_t job_full(int slot) const { return query_full(2 * plan.query_stages + slot); }
  __device__ uint32_t job_empty(int slot) const { return job_full(kJobs + slot); }

  // By the whole block, which must be synchronised after it. A warp at a time: lanes would take turns.
  __device__ void init_barriers() const {
    constexpr int kGroupWarps = kGroupThreads / kWarpThreads;
    constexpr int kLoaderThreads = 2 * kWarpThreads;
    const int empties = plan.stages, queries_full = 2 * plan.stages;
    const int queries_empty = queries_full + plan.query_stages, jobs_full = queries_empty + plan.query_stages;
    const int jobs_empty = jobs_full + kJobs;
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpThreads, 0);
#pragma unroll 1
    for (int i = warp; i < jobs_empty + kJobs; i += (kGroups + 1) * kGroupWarps) {
      const int arrivals = i < empties         ? 1
                           : i < queries_full  ? kGroups / turns * kGroupWarps
                           : i < queries_empty ? kLoaderThreads
                           : i < jobs_full     ? kGroups * kGroupThreads
                           : i < jobs_empty    ? 1
                                               : kLoaderThreads;
      if (lane == 0) device::init_barrier(full(i), arrivals);
    }
    device::fence_barrier_init();
  }

  // Lengths, block tables, queries and weights of small batches, a line per thread of the whole grid: they will be
  // needed one after the other, and may then come from the L2 cache.
  __device__ void prefetch_small_inputs() const {
    if (p.capacity == 0) return;  // there may be no block table
    constexpr int kLine = 128;
    const int64_t offset = (int64_t{threadIdx.x} * gridDim.x + blockIdx.x) * kLine;
    const auto prefetch = [&](const void* data, int64_t bytes) {
      if (offset < bytes) device::prefetch_line(static_cast<const uint8_t*>(data) + offset);
    };
    prefetch(p.lengths.data, ((p.batch - 1) * p.lengths.batch_stride + 1) * 4);
    prefetch(p.block_tables, ((p.batch - 1) * p.table_stride + p.table_width) * 4);
    prefetch(p.q, (p.batch - 1) * p.q_batch_stride + kHeads * kValueBytes);
    if (!kFp8) prefetch(p.q_scales, ((p.batch - 1) * p.q_scales_batch_stride + kHeads) * 4);
    const int weight_bytes = p.weights_type == FloatType::kFloat32 ? 4 : 2;
    prefetch(p.weights, ((p.batch * p.next_n - 1) * p.weights_stride + kHeads) * weight_bytes);
  }

  // -------------------------------------------------------------------------------------------------------------------
  // producer
  // -------------------------------------------------------------------------------------------------------------------

  // Hands a job to the loaders, which hand it to the consumers with its query.
  __device__ void post_job(int sequence, Job next) const {
    const int slot = sequence % kJobs;
    device::wait(job_empty(slot), (sequence / kJobs & 1) ^ 1);
    __syncwarp();  // once lane 0 has arrived, the barrier may move on under a lane that still waits
    if (lane == 0) {
      device::store_shared(job(slot), int4{next.request, next.first_tile, next.tiles, 0});
      device::arrive(job_full(slot));
    }
  }

  // Where the producer is: the ring's next stage, and jobs posted.
  struct Progress {
    RingPosition ring;
    int jobs;
  };

  // A tile lies in several pages where these are small. A lane starts the copies of one part, what one of a burst's
  // tiles has of one page.
  struct Parts {
    int block_shift, part_shift;  // log2 of a page's and of a part's tokens
    int part, tile;               // this lane's part, of this tile of the burst

    __device__ Parts(int page_shift, int lane)
        : block_shift(page_shift),
          part_shift(min(page_shift, kTileShift)),
          part(lane & ((1 << (kTileShift - part_shift)) - 1)),
          tile(lane >> (kTileShift - part_shift)) {}
    __device__ int tokens() const { return 1 << part_shift; }
    // Of the burst's parts, a bit each, those of this lane's tile.
    __device__ unsigned of_tile(unsigned parts) const {
      return parts >> (tile << (kTileShift - part_shift)) & ((1u << (1 << (kTileShift - part_shift))) - 1);
    }
  };

  // Entries of a request's block table, in each lane one of two windows: 32 from `window` on, and the 32 after those.
  struct Pages {
    const int32_t* table;
    int live;  // entries that live positions need; others are not read, but taken as absent
    int window;
    int pages, next_pages;

    __device__ int load(int column) const { return column < live ? table[column] : -1; }

    // As of the request at which a walk is, from its first tile on.
    __device__ Pages(const LogitsParams& p, const RequestWalk<kTileTokens>& walk, int lane)
        : table(p.block_tables + walk.request * p.table_stride),
          live(static_cast<int>((walk.limit + (1u << p.cache.block_shift) - 1) >> p.cache.block_shift)),
          window(static_cast<int>(walk.first_tile * kTileTokens >> p.cache.block_shift)),
          pages(load(window + lane)),
          next_pages(load(window + kWarpThreads + lane)) {}

    __device__ void slide(int lane) {
      window += kWarpThreads;
      pages = next_pages;
      next_pages = load(window + kWarpThreads + lane);
    }
  };

  // `pages` are those of the walk's first request.
  __device__ void produce_run(RequestWalk<kTileTokens> walk, Pages pages, Progress& at) const {
    const Parts own(p.cache.block_shift, lane);
    const int part_bytes = own.tokens() * (kValueBytes + kScaleBytes);
    const auto num_blocks = static_cast<unsigned>(min(p.cache.num_blocks, int64_t{1} << 31));
    const uint64_t policy = device::evict_first();

    while (!walk.done()) {
      if (walk.first_tile < walk.last_tile) {
        post_job(at.jobs++, {walk.request, walk.first_tile, walk.last_tile - walk.first_tile});
      }
#pragma unroll 1
      for (int first = walk.first_tile; first < walk.last_tile; first += kBurst) {
        const int count = min(kBurst, walk.last_tile - first);
        const unsigned token = (first + own.tile) * kTileTokens + own.part * own.tokens();
        const int entry = static_cast<int>(token >> own.block_shift) - pages.window;
        int page = __shfl_sync(~0u, pages.pages, entry);
        if (__any_sync(~0u, own.tile < count && entry >= kWarpThreads)) {
          const int later_page = __shfl_sync(~0u, pages.next_pages, entry);
          if (entry >= kWarpThreads) page = later_page;
        }
        if (static_cast<int>((first + kBurst) * kTileTokens >> own.block_shift) - pages.window >= kWarpThreads) {
          pages.slide(lane);
        }
        const bool present = own.tile < count && static_cast<unsigned>(page) < num_blocks;
        const unsigned all_present = __ballot_sync(~0u, present);
        RingPosition mine = at.ring;
        mine.advance(own.tile, plan.stages);
        if (own.part == 0 && own.tile < count) {
          const unsigned tile_present = own.of_tile(all_present);
          device::wait(empty(mine.stage), mine.parity);
          device::store_shared(absent(mine.stage), static_cast<int>(~tile_present));
          device::arrive_expecting(full(mine.stage), __popc(tile_present) * part_bytes);
        }
        at.ring.advance(count, plan.stages);
        __syncwarp();  // no lane may wait while others start copies
        if (present) {
          const int in_block = static_cast<int>(token) & (static_cast<int>(p.cache.block_size) - 1);
          const int in_tile = own.part * own.tokens();
          const uint8_t* block = p.cache.data + page * p.cache.block_stride;
          const uint8_t* page_scales = block + p.cache.block_size * kValueBytes + in_block * kScaleBytes;
          const uint32_t barrier = full(mine.stage);
          if constexpr (kFp8) {
            // The copies are served in order: behind the values, the first tile's scales would wait for all of them.
            device::copy_bulk(scales(mine.stage) + in_tile * 4, page_scales, own.tokens() * 4, barrier, policy);
            device::copy_box(values(mine.stage) + in_tile * kHeadDim, &keys, 0, in_block, page, barrier, policy);
          } else {
            const uint32_t target = values(mine.stage) + own.part * part_bytes;
            if (p.cache.block_size <= kTileTokens) {
              device::copy_bulk(target, block, part_bytes, barrier, policy);
            } else {
              constexpr int kTileValues = kTileTokens * kValueBytes;
              device::copy_bulk(target + kTileValues, page_scales, kTileTokens * kScaleBytes, barrier, policy);
              device::copy_bulk(target, block + in_block * kValueBytes, kTileValues, barrier, policy);
            }
          }
        }
        __syncwarp();
      }
      walk.next_request(p);
      if (!walk.done()) pages = Pages(p, walk, lane);
    }
  }

  // This block's share of the tiles.
  __device__ RequestWalk<kTileTokens> own_share(const TileMap<kTileTokens>& map) const {
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    const int base = static_cast<int>(static_cast<unsigned>(map.total) / gridDim.x);
    const int extra = map.total - base * blocks;
    return map.walk(p, block * base + min(block, extra), base + (block < extra ? 1 : 0));
  }

  __device__ void produce() const {
    Progress at{{0, 1}, 0};
    if (p.schedule == nullptr) {
      // Before the kernel in front has finished, lengths may be about to change. They rarely do: with the share that
      // they gave, lengths and pages can be read at once, instead of one after the other.
      if (!plan.guesses) device::wait_for_previous_kernel();
      const TileMap<kTileTokens> map(p);
      RequestWalk<kTileTokens> walk = own_share(map);
      if (plan.guesses) device::wait_for_previous_kernel();
      Pages pages(p, walk, lane);
      if (plan.guesses) {
        const TileMap<kTileTokens> now(p);
        if (!now.equals(map)) {
          walk = own_share(now);
          pages = Pages(p, walk, lane);
        }
      }
      produce_run(walk, pages, at);
    } else {
      device::wait_for_previous_kernel();
      const auto start = [&](int64_t block) {
        return load_start(p.schedule, block * p.workers / gridDim.x, p.workers, static_cast<int>(p.batch));
      };
      const RequestWalk<kTileTokens> walk(p, start(blockIdx.x), start(blockIdx.x + 1), kUnitTokens / kTileTokens);
      produce_run(walk, Pages(p, walk, lane), at);
    }
    post_job(at.jobs, {-1, 0, -1});
  }

  // -------------------------------------------------------------------------------------------------------------------
  // loaders
  // -------------------------------------------------------------------------------------------------------------------

  // load(job, stage) for each of the producer's jobs.
  template <typename Load>
  __device__ void serve_jobs(const Load& load) const {
    RingPosition ring{0, 1};
#pragma unroll 1
    for (int sequence = 0;; ++sequence) {
      const int slot = sequence % kJobs;
      device::wait(job_full(slot), sequence / kJobs & 1);
      const int4 words = device::load_shared_int4(job(slot));
      device::arrive(job_empty(slot));
      device::wait(query_empty(ring.stage), ring.parity);
      load(Job{words.x, words.y, words.z}, ring.stage);
      device::fence_async_proxy();
      device::arrive(query_full(ring.stage));
      if (words.z < 0) return;
      ring.advance(1, plan.query_stages);
    }
  }

  __device__ void release(uint32_t barrier) const {
    __syncwarp();  // every lane has read what the barrier guards
    if (lane == 0) device::arrive(barrier);
  }
};

}  // namespace mqa::paged_logits
