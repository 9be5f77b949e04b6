// FP8 paged logits on Hopper (sm_90a), for every shape whose queries fit in shared memory.
//
// One block per multiprocessor (or two) takes an equal run of the tiles of 64 tokens of all requests. A producer warp
// walks the run and fetches K by bulk tensor copies (one box per page and tile, swizzled for the matrix unit) and the
// tokens' scales by bulk copies into a ring of stages; two more warps fetch each request's q and weights one request
// ahead. Groups of four warps score tiles: wgmma with K as the row operand (64 tokens) and the heads of one to four
// query slots as columns, both from shared memory, then the sum over heads in registers: two operations per product.
// All slots share one read of K.
//
// The host asks for programmatic dependent launch: a block's set-up overlaps the end of the kernel in front, and all of
// that kernel where the two fit a multiprocessor together.
//
// What bounds it: up to 64 columns the read of K, at 128 nearly so. Beyond, a tile of 256 columns takes its two groups
// 830 clocks where the matrix unit needs 512: a group's sums take 1,100 (400 instructions, which the register file
// serves more slowly while products are under way), its products 540; and the card lowers its clock, to 1.65 GHz.
//
// Only the producer looks at lengths to find its way, and hands the rest what it found: whatever is written to the
// inputs meanwhile, nobody waits for a tile that does not come.
//
// Accuracy: the fp8 matrix unit aligns the 32 products of a step to the largest and keeps about 13 bits.
//
// What paid: a short way from tile to tile in the producer, which one warp can only just keep up with (each of a
// burst's stages waited for by its own lane); K marked to leave the L2 cache first, and no promotion of its reads;
// starting the copies of four tiles from as many lanes (eight start later, which small batches feel); scales ahead of
// values, or every tile of a burst waits for all of it; addresses and bounds that the compiler cannot rebuild per tile;
// jobs, so that a consumer reads nothing about a tile before its products; weights held in registers (shared memory,
// busy with the products, makes 256 columns a tenth slower). What did not: products of the next tile started before the
// sums of one (two sets of accumulators; more warps hide as much), 64 columns per instruction where there are more
// (both operands come from shared memory, at all its rate; K from registers costs more instructions), a slot instead of
// a tile per group, a maximum or a predicated sum for x + |x|, reading K's first tiles into the L2 cache ahead of the
// kernel in front, a second producer, clusters of 8 (half of them do not fit at once), more blocks than fit at once,
// handing out the last tiles by an atomic counter (a chunk of four takes its block 2 us to find). Untried in earnest:
// sum w relu(x) = (sum w x + sum w |x|) / 2 with the first sum from a few more columns (w folded into q, in pieces)
// leaves one operation per product; with it for nothing, 128 columns took 3 to 8 % less time and 256 took 10 % less.
//
// Bits: a score depends on its own q, K, scale and weights alone; tiles and slots only move about.
#pragma once

#include <cstdint>

#include "device/float_types.cuh"
#include "device/mbarrier.cuh"
#include "device/wgmma.cuh"
#include "paged_logits/hopper_config.h"
#include "paged_logits/hopper_mxfp4.cuh"
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

// kSlots: query slots that a matrix instruction takes together, a set; the columns are their heads. With fewer than
// four groups there is one set: the groups take turns at the tiles, and a lane holds its weights in registers.
// kOutBytes, below: of a result; a branch per result is felt where the sums are the bound.
template <CacheFormat kFormat, int kHeadDim, int kHeads, int kSlots, int kGroups, int kBlocks, bool kOneSet>
struct HopperKernel {
  using TileShape = HopperTile<kFormat, kHeadDim>;
  static constexpr bool kFp8 = TileShape::kFp8;
  static constexpr unsigned kTileTokens = TileShape::kTokens;
  static constexpr int kTileShift = TileShape::kShift;
  static constexpr int kValueBytes = TileShape::kValueBytes;
  static constexpr int kScaleBytes = TileShape::kScaleBytes;
  static constexpr int kSlabs = TileShape::kTokens / kMatrixRows;  // of a tile
  // Slabs whose scores are stored together, and so come from different lanes; with several slots these share the lanes.
  static constexpr int kJointSlabs = kSlots == 1 && kOneSet ? kSlabs : 1;
  static constexpr int kStores = kSlabs / kJointSlabs;
  static constexpr int kColumns = kSlots * kHeads;
  static constexpr int kAccumulators = kColumns / 2;         // per thread
  static constexpr int kWeightVectors = (kHeads + 15) / 16;  // of 16 bytes, per slot and lane of a quad
  static constexpr int kPartials = kSlots * kJointSlabs;
  static constexpr int kResults = (kPartials + 1) / 2;           // that a lane stores at once
  // MXFP4: a slab is decoded while the matrix unit works on the one before it, where the registers suffice.
  static constexpr bool kDecodesAhead = kBlocks == 1;
  static constexpr int kHeldWeights = kOneSet ? kHeads / 4 : 1;  // per slot

  const LogitsParams& p;
  const CUtensorMap& keys;     // [blocks][S][D]
  const CUtensorMap& queries;  // [B][n][H][D]
  const HopperPlan& plan;
  uint32_t shared;
  int lane;
  int sets;
  // Groups that take turns at one set; the sets of a group are set_step apart.
  int turns, set_step;

  __device__ HopperKernel(const LogitsParams& params, const CUtensorMap& key_map, const CUtensorMap& query_map,
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
  __device__ uint32_t scales(int stage) const {
    return shared + plan.scales + stage * (TileShape::kTokens * 4);
  }  // FP8
  __device__ uint32_t absent(int stage) const { return shared + plan.absent + stage * 4; }  // bit per page of the tile
  __device__ uint32_t query(int stage) const { return shared + plan.queries + stage * plan.query_bytes; }
  // [slots][kWeightVectors][4 lanes of a quad][16 bytes]: the weights of a lane's columns, halved: relu_twice doubles.
  __device__ uint32_t weights(int stage) const {
    return shared + plan.weights + stage * sets * kSlots * (kWeightVectors * 64);
  }
  __device__ uint32_t limits(int stage) const { return shared + plan.limits + stage * (kMaxSlots * 4); }
  __device__ uint32_t powers(int stage) const { return shared + plan.powers + stage * (kMaxSlots * 4); }  // MXFP4
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
    __device__ Pages(const LogitsParams& p, const RequestWalk<TileShape::kTokens>& walk, int lane)
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
  __device__ void produce_run(RequestWalk<TileShape::kTokens> walk, Pages pages, Progress& at) const {
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
            if (p.cache.block_size <= TileShape::kTokens) {
              device::copy_bulk(target, block, part_bytes, barrier, policy);
            } else {
              constexpr int kTileValues = TileShape::kTokens * kValueBytes;
              device::copy_bulk(target + kTileValues, page_scales, TileShape::kTokens * kScaleBytes, barrier, policy);
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
  __device__ RequestWalk<TileShape::kTokens> own_share(const TileMap<TileShape::kTokens>& map) const {
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
      const TileMap<TileShape::kTokens> map(p);
      RequestWalk<TileShape::kTokens> walk = own_share(map);
      if (plan.guesses) device::wait_for_previous_kernel();
      Pages pages(p, walk, lane);
      if (plan.guesses) {
        const TileMap<TileShape::kTokens> now(p);
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
      const RequestWalk<TileShape::kTokens> walk(p, start(blockIdx.x), start(blockIdx.x + 1),
                                                 kUnitTokens / TileShape::kTokens);
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

  __device__ void load_queries() const {
    constexpr int kSlotBytes = kHeads * kHeadDim;
    const int next_n = static_cast<int>(p.next_n);
    serve_jobs([&](const Job& next, int stage) {
      if (next.tiles < 0) return;
      const int request = next.request;
      if (plan.query_boxes) {
        if (lane == 0) {
          device::expect(query_full(stage), next_n * kSlotBytes);
#pragma unroll 1
          for (int slot = 0; slot < next_n; ++slot) {
            device::copy_box(query(stage) + slot * kSlotBytes, &queries, 0, 0, slot, request, query_full(stage));
          }
        }
        return;
      }
      // Views that the copy engine does not take.
      constexpr int kRowChunks = kHeadDim / 16;
#pragma unroll 1
      for (int item = lane; item < next_n * kHeads * kRowChunks; item += kWarpThreads) {
        const int row = item / kRowChunks;
        const uint4 chunk = device::load_any<uint4>(p.q + request * p.q_batch_stride + row / kHeads * p.q_slot_stride +
                                                    row % kHeads * kHeadDim + item % kRowChunks * 16);
        device::store_shared(query(stage) + device::swizzle<kHeadDim>(item * 16), chunk);
      }
    });
  }

  // A head's place among the weights of its slot.
  __device__ static int weight_place(int head) {
    return head / 16 * 16 + head / 2 % 4 * 4 + head / 8 % 2 * 2 + head % 2;
  }

  template <FloatType kType>
  __device__ void load_weights_as(int request, uint32_t target) const {
    const int items = static_cast<int>(p.next_n) * kHeads;
#pragma unroll 2
    for (int item = lane; item < items; item += kWarpThreads) {
      const int head = item % kHeads;
      const int64_t row = int64_t{request} * p.next_n + item / kHeads;
      const float weight = device::load_float(p.weights, kType, row * p.weights_stride + head);
      const int place = item / kHeads * (kWeightVectors * 16) + weight_place(head);
      device::store_shared(target + place * 4, 0.5f * weight);
    }
  }

  __device__ void load_weights() const {
    serve_jobs([&](const Job& next, int stage) {
      if (lane == 0) device::store_shared(query_job(stage), int4{next.request, next.first_tile, next.tiles, 0});
      if (next.tiles < 0) return;
      const int request = next.request;
      if (lane < p.next_n) device::store_shared(limits(stage) + lane * 4, row_limit(p, request, lane));
      switch (p.weights_type) {
        case FloatType::kBFloat16: return load_weights_as<FloatType::kBFloat16>(request, weights(stage));
        case FloatType::kFloat16: return load_weights_as<FloatType::kFloat16>(request, weights(stage));
        default: return load_weights_as<FloatType::kFloat32>(request, weights(stage));
      }
    });
  }

  // MXFP4: q as e4m3, in the order of elements in which K is decoded, and weights; by both loaders.
  __device__ void load_mxfp4(int loader) const {
    constexpr int kLoaders = 2;
    constexpr int kStep = kLoaders * kWarpThreads;  // of a lane's parts of rows, four to a row
    constexpr int kAtOnce = MQA_ATONCE;
    const int next_n = static_cast<int>(p.next_n);
    const int parts = next_n * kHeads * 4;
    const auto layout = reinterpret_cast<uint64_t>(p.q) | p.q_batch_stride | p.q_slot_stride;
    const bool aligned = layout % 16 == 0;
    serve_jobs([&](const Job& next, int stage) {
      if (loader == 0 && lane == 0) {
        device::store_shared(query_job(stage), int4{next.request, next.first_tile, next.tiles, 0});
      }
      if (next.tiles < 0) return;
      const uint8_t* q = p.q + next.request * p.q_batch_stride;
      const uint32_t* q_scales = p.q_scales + next.request * p.q_scales_batch_stride;
      // Weights are under way while q is decoded.
      int slot = kLoaders - 1 - loader;
      Mxfp4Weights<kHeads> slot_weights;
      if (slot < next_n) slot_weights.load(p, next.request, slot, lane);

#pragma unroll 1
      for (int first = loader * kWarpThreads + lane; first < parts; first += kAtOnce * kStep) {
        Mxfp4Part<kHeadDim> part[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int row = min(first + i * kStep, parts - 1) / 4;
          const int row_slot = row / kHeads, head = row % kHeads;
          part[i].load(q + row_slot * p.q_slot_stride + head * kValueBytes, lane % 4, aligned);
          part[i].row_scales = q_scales[row_slot * p.q_scales_slot_stride + head];
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i * kStep >= parts) break;
          const MagnitudeTable table = part[i].table(lane % 4);
          const int row = (first + i * kStep) / 4;
#pragma unroll
          for (int k = 0; k < part[i].kWords; ++k) {
            uint32_t x, y;
            table.expand(part[i].words[k], x, y);
            const int at = row * kHeadDim + k * 32 + lane % 4 * 4;
            device::store_shared(query(stage) + device::swizzle<kHeadDim>(at), static_cast<int>(x));
            device::store_shared(query(stage) + device::swizzle<kHeadDim>(at + 16), static_cast<int>(y));
          }
        }
      }

      if (loader == 0 && lane < next_n) {
        device::store_shared(limits(stage) + lane * 4, row_limit(p, next.request, lane));
      }
      while (slot < next_n) {
        const int power = slot_weights.template normalise<kHeadDim>(q + slot * p.q_slot_stride, lane, aligned);
        if (lane == 0) device::store_shared(powers(stage) + slot * 4, power);
#pragma unroll
        for (int i = 0; i < slot_weights.kLaneHeads; ++i) {
          const int head = lane + i * kWarpThreads;
          const int place = slot * (kWeightVectors * 16) + weight_place(head);
          if (head < kHeads) device::store_shared(weights(stage) + place * 4, 0.5f * slot_weights.weight[i]);
        }
        slot += kLoaders;
        if (slot < next_n) slot_weights.load(p, next.request, slot, lane);
      }
    });
  }

  // -------------------------------------------------------------------------------------------------------------------
  // consumers: groups of four warps. Those of one set take turns at the tiles.
  // -------------------------------------------------------------------------------------------------------------------

  // What a lane must know of a request and a set: at once it stores the scores of one token for kResults slots, number
  // 2 k + (lane >> 1 & 1) of the set; or, of one slot, that of one token in slab (lane >> 1 & 1).
  struct Rows {
    uint32_t weights;
    float held_weights[kSlots][kHeldWeights];
    uint8_t* out[kResults];    // of the token in the request's first tile
    unsigned limit[kResults];  // columns below it are live,
    unsigned bound[kResults];  // below this they are written
    int power[kResults];       // MXFP4: of the slot's weights
  };

  // The weights of a lane's columns among 16 heads.
  __device__ static int4 load_weight_vector(const Rows& rows, int slot, int vector) {
    return device::load_shared_int4(rows.weights + (slot * kWeightVectors + vector) * 64);
  }

  template <int kOutBytes>
  __device__ void load_rows(Rows& rows, int request, int query_stage, int set, int token) const {
    rows.weights = weights(query_stage) + set * kSlots * (kWeightVectors * 64) + lane % 4 * 16;
    if constexpr (kOneSet) {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
        for (int vector = 0; vector < kWeightVectors; ++vector) {
          const int4 bits = load_weight_vector(rows, slot, vector);
          const int words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
          for (int i = 0; i < min(4, kHeldWeights); ++i) {
            rows.held_weights[slot][4 * vector + i] = __int_as_float(words[i]);
          }
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kResults; ++k) {
      const int in_set = kJointSlabs > 1 ? 0 : 2 * k + (lane >> 1 & 1);
      const int slot = set * kSlots + min(in_set, kSlots - 1);
      const bool stores = in_set < kSlots && slot < p.next_n;
      const auto limit = static_cast<unsigned>(device::load_shared_int(limits(query_stage) + slot * 4));
      rows.limit[k] = limit;
      rows.bound[k] = !stores ? 0 : p.clean ? static_cast<unsigned>(p.max_seq_len) : limit;
      rows.out[k] = static_cast<uint8_t*>(p.out) + ((request * p.next_n + slot) * p.out_stride + token) * kOutBytes;
      if constexpr (!kFp8) rows.power[k] = device::load_shared_int(powers(query_stage) + slot * 4);
      // Opaque to the compiler, which would else compute them anew for every tile.
      asm volatile("" : "+l"(rows.out[k]), "+r"(rows.bound[k]));
    }
  }

  using TokenPart = Mxfp4Part<kHeadDim>;

  // Where a lane's part of a tile lies in its stage: rows g and g + 8 of its warp's 16 in each slab. A row is in the
  // page of its neighbours, so that these are a fixed step away.
  struct Mxfp4Places {
    int values, scales;  // of the first row
    int slab_values, slab_scales, half_scales;

    __device__ Mxfp4Places(const PagedCache& cache, int row, int c) {
      const int shift = min(cache.block_shift, kTileShift);
      const int tokens = 1 << shift;
      const int part = (row >> shift) * tokens * (kValueBytes + kScaleBytes);
      const int in_part = row & (tokens - 1);
      const bool split = shift < kTileShift;  // slabs are in different pages
      values = part + in_part * kValueBytes + c * (4 * TokenPart::kWords);
      slab_values = kMatrixRows * (kValueBytes + (split ? kScaleBytes : 0));
      const int place = cache.interleaved_scales ? 4 * (in_part % 32) + in_part / 32 : in_part;
      scales = part + tokens * kValueBytes + place * kScaleBytes + c * kScaleBytes / 4;
      slab_scales = split ? slab_values : (cache.interleaved_scales ? 2 : kMatrixRows) * kScaleBytes;
      half_scales = (cache.interleaved_scales ? 32 : 8) * kScaleBytes;
    }
  };

  // Operands of a matrix instruction in registers: a step's are rows g and g + 8, each first its bytes 4 c to 4 c + 3,
  // then those 16 further.
  using Operands = uint32_t[kHeadDim / 32][4];

  // Decodes a lane's part of a slab, and returns the scale code that rows g (even lanes) or g + 8 (odd ones) are
  // relative to. `reference` is a code that has served the warp before: as long as all its scales are near below it,
  // all its rows are relative to that.
  __device__ int load_slab(Operands& operands, const Mxfp4Places& places, uint32_t tile, int slab,
                           int& reference) const {
    int codes[2];
    TokenPart part[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      codes[half] =
          device::load_shared_byte(tile + places.scales + slab * places.slab_scales + half * places.half_scales);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t row = tile + places.values + slab * places.slab_values + half * (8 * kValueBytes);
      if constexpr (TokenPart::kWords == 4) {
        const int4 vector = device::load_shared_int4(row);
        part[half].words[0] = vector.x, part[half].words[1] = vector.y, part[half].words[2] = vector.z,
        part[half].words[3] = vector.w;
      } else {
        const int2 pair = device::load_shared_int2(row);
        part[half].words[0] = pair.x, part[half].words[1] = pair.y;
      }
    }
    const auto near = [&](int code) {
      return __all_sync(~0u, static_cast<unsigned>(code - codes[0]) <= kNormalWindow &&
                                 static_cast<unsigned>(code - codes[1]) <= kNormalWindow);
    };
    MagnitudeTable tables[2] = {normal_table(codes[0], reference), normal_table(codes[1], reference)};
    int scale = reference;
    if (!near(reference)) {
      const int largest = __reduce_max_sync(~0u, max(codes[0], codes[1]));
      if (largest != kNanScale && near(largest)) {
        scale = reference = largest;
        tables[0] = normal_table(codes[0], reference);
        tables[1] = normal_table(codes[1], reference);
      } else {
        const int scales[2] = {TokenPart::row_scale(part[0].any(), codes[0]),
                               TokenPart::row_scale(part[1].any(), codes[1])};
        tables[0] = any_table(codes[0], scales[0]);
        tables[1] = any_table(codes[1], scales[1]);
        scale = lane & 1 ? scales[1] : scales[0];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < TokenPart::kWords; ++i) {
        tables[half].expand(part[half].words[i], operands[i][half], operands[i][2 + half]);
      }
    }
    // Now, not when they are used.
#pragma unroll
    for (int k = 0; k < kHeadDim / 32; ++k) device::pin(operands[k]);
    return scale;
  }

  // Scores of a slab under the heads of a set: `tokens` is a descriptor, or operands in registers. `meanwhile` runs
  // while the matrix unit works.
  template <typename Tokens, typename Meanwhile>
  __device__ void multiply(float (&scores)[kAccumulators], Tokens&& tokens, uint32_t set_queries,
                           const Meanwhile& meanwhile) const {
    const device::MatrixDescriptor heads(set_queries);
    device::pin(scores);
    device::matrix_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 32; ++k) {
      if constexpr (kFp8) {
        device::multiply<kColumns>(scores, tokens.template at<kHeadDim>(k), heads.at<kHeadDim>(k), k > 0);
      } else {
        device::multiply<kColumns>(scores, tokens[k], heads.at<kHeadDim>(k), k > 0);
      }
    }
    device::matrix_commit();
    meanwhile();
    device::matrix_wait<0>();
    device::pin(scores);
  }

  // max(x, 0) + max(x, 0), NaN kept: two full-rate operations where a maximum takes half-rate ones. A product of e4m3
  // rows is far from overflow.
  __device__ static float relu_twice(float x) { return x + fabsf(x); }

  // Sums of a slab over a lane's heads, one per slot: of token g + 8 in odd lanes, of token g in even ones; the rest is
  // two lanes away.
  __device__ void sum_heads(float* sums_of_slots, const float (&scores)[kAccumulators], const Rows& rows) const {
    const bool odd = lane & 1;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      float sums[4] = {0.f, 0.f, 0.f, 0.f};  // even and odd columns of token g, then of token g + 8
#pragma unroll
      for (int vector = 0; vector < kWeightVectors; ++vector) {
        float w[4];
        if constexpr (kOneSet) {
#pragma unroll
          for (int i = 0; i < min(4, kHeldWeights); ++i) w[i] = rows.held_weights[slot][4 * vector + i];
        } else {
          const int4 bits = load_weight_vector(rows, slot, vector);
          w[0] = __int_as_float(bits.x);
          w[1] = __int_as_float(bits.y);
          w[2] = __int_as_float(bits.z);
          w[3] = __int_as_float(bits.w);
        }
#pragma unroll
        for (int j = 0; j < (kHeads < 16 ? 1 : 2); ++j) {
          const float* d = scores + slot * (kHeads / 2) + 8 * vector + 4 * j;
          sums[0] = fmaf(relu_twice(d[0]), w[2 * j], sums[0]);
          sums[1] = fmaf(relu_twice(d[1]), w[2 * j + 1], sums[1]);
          sums[2] = fmaf(relu_twice(d[2]), w[2 * j], sums[2]);
          sums[3] = fmaf(relu_twice(d[3]), w[2 * j + 1], sums[3]);
        }
      }
      const float token_0 = sums[0] + sums[1];
      const float token_8 = sums[2] + sums[3];
      sums_of_slots[slot] = (odd ? token_8 : token_0) + __shfl_xor_sync(~0u, odd ? token_0 : token_8, 1);
    }
  }

  // What a lane must know of the token whose scores it stores.
  struct Token {
    uint64_t number;  // in the request, less those of the lane itself
    unsigned column;
    bool absent;
    float scale;     // FP8
    int scale_code;  // MXFP4
  };

  __device__ static float scaled(float sum, const Token& token, int power) {
    if constexpr (kFp8) return sum * token.scale;
    const int exponent = token.scale_code - kScaleBias - kTopPower + power;
    const bool normal = static_cast<unsigned>(exponent + 126) <= 253;
    return normal ? sum * __int_as_float((exponent + 127) << 23) : ldexpf(sum, exponent);
  }

  template <int kOutBytes>
  __device__ void store(const float (&partials)[kPartials], const Token& token, const Rows& rows) const {
    const bool upper = lane & 2;
#pragma unroll
    for (int k = 0; k < kResults; ++k) {
      // Two partial results share the last step, where there are two.
      const int second = min(2 * k + 1, kPartials - 1);
      const float own = upper ? partials[second] : partials[2 * k];
      const float other = upper ? partials[2 * k] : partials[second];
      const float sum = own + __shfl_xor_sync(~0u, other, 2);
      if (token.column < rows.bound[k]) {
        const float score =
            token.column < rows.limit[k] && !token.absent ? scaled(sum, token, rows.power[k]) : -INFINITY;
        uint8_t* target = rows.out[k] + token.number * kOutBytes;
        __builtin_assume(__isGlobal(target));  // forgotten when it was made opaque
        if constexpr (kOutBytes == 4) {
          *reinterpret_cast<float*>(target) = score;
        } else {
          device::store_float(target, p.out_type, 0, score);
        }
      }
    }
  }

  __device__ void release(uint32_t barrier) const {
    __syncwarp();  // every lane has read what the barrier guards
    if (lane == 0) device::arrive(barrier);
  }

  template <int kOutBytes>
  __device__ void consume(int group) const {
    const int warp = static_cast<int>(threadIdx.x) / kWarpThreads % 4;
    const int row = 16 * warp + lane / 4;
    // Whose scores this lane stores, and its page's bit among a tile's.
    const int token = row + 8 * (lane & 1) + (kJointSlabs > 1 ? lane >> 1 & 1 : 0) * kMatrixRows;
    int token_page[kStores];
#pragma unroll
    for (int j = 0; j < kStores; ++j) {
      token_page[j] = 1 << ((token + j * kMatrixRows) >> min(p.cache.block_shift, kTileShift));
      asm volatile("" : "+r"(token_page[j]));  // as in load_rows
    }
    [[maybe_unused]] const Mxfp4Places places(p.cache, row, lane % 4);
    [[maybe_unused]] int reference = 0;
    const int first_set = group % set_step;
    const bool one_set = kOneSet || (first_set < sets && sets <= set_step);  // for this group
    int skip = group / set_step;  // tiles of the next job that come before this group's next tile
    RingPosition ring{skip, 0};
    RingPosition query_ring{0, 0};
    Rows rows;
    float scores[kAccumulators];
#pragma unroll 1
    while (true) {
      const int query_stage = query_ring.stage;
      device::wait(query_full(query_stage), query_ring.parity);
      const int4 words = device::load_shared_int4(query_job(query_stage));
      // Of the first lane, so that the compiler knows it to be the same in all.
      const Job job{words.x, words.y, __shfl_sync(~0u, words.z, 0)};
      if (job.tiles < 0) return;
      if (one_set && skip < job.tiles) load_rows<kOutBytes>(rows, job.request, query_stage, first_set, token);
      const uint32_t queries_at = query(query_stage) + first_set * (kColumns * kHeadDim);

      // Scores of a slab; those of joint slabs are stored with the last one. `scored` runs when the matrix unit has
      // read the tokens for the last time.
      float partials[kPartials];
      const auto score_slab = [&](auto&& tokens, int slab, const Token& own, const auto& meanwhile,
                                  const auto& scored) {
        if (one_set) {
          multiply(scores, tokens, queries_at, meanwhile);
          scored();
          const int joint = slab % kJointSlabs;
          sum_heads(partials + joint * kSlots, scores, rows);
          if (joint == kJointSlabs - 1) store<kOutBytes>(partials, own, rows);
          return;
        }
#pragma unroll 1
        for (int set = first_set; set < sets; set += set_step) {
          multiply(scores, tokens, query(query_stage) + set * (kColumns * kHeadDim), [&] {
            if (set == first_set) meanwhile();
          });
          load_rows<kOutBytes>(rows, job.request, query_stage, set, token);
          sum_heads(partials, scores, rows);
          store<kOutBytes>(partials, own, rows);
        }
        scored();
      };
      const auto token_of = [&](int tile, int absent_pages, int slab) {
        const int j = slab / kJointSlabs;
        const auto number = static_cast<unsigned>(job.first_tile + tile);
        return Token{uint64_t{number} * kTileTokens + j * kMatrixRows, number * kTileTokens + j * kMatrixRows + token,
                     (absent_pages & token_page[j]) != 0, 0.f, 0};
      };
      const auto nothing = [] {};

      int i = skip;
      if constexpr (kFp8) {
#pragma unroll 1
        for (; i < job.tiles; i += turns) {
          device::wait(full(ring.stage), ring.parity);
          Token own = token_of(i, device::load_shared_int(absent(ring.stage)), 0);
          own.scale = device::load_shared_float(scales(ring.stage) + token * 4);
          score_slab(device::MatrixDescriptor(values(ring.stage)), 0, own, nothing,
                     [&] { release(empty(ring.stage)); });
          ring.advance(turns, plan.stages);
        }
      } else {
        Operands operands[kDecodesAhead ? 2 : 1];
        int codes[2];
        const auto decode_first = [&] {
          device::wait(full(ring.stage), ring.parity);
          codes[0] = load_slab(operands[0], places, values(ring.stage), 0, reference);
        };
        const auto decode_second = [&] {
          codes[1] = load_slab(operands[kDecodesAhead ? 1 : 0], places, values(ring.stage), 1, reference);
          release(empty(ring.stage));
          ring.advance(turns, plan.stages);
        };
        if (kDecodesAhead && i < job.tiles) decode_first();
#pragma unroll 1
        for (; i < job.tiles; i += turns) {
          if (!kDecodesAhead) decode_first();
          const int absent_pages = device::load_shared_int(absent(ring.stage));
          Token own = token_of(i, absent_pages, 0);
          const int first_code = own.scale_code = codes[0];
          if constexpr (kDecodesAhead) {
            score_slab(operands[0], 0, own, decode_second, nothing);
          } else {
            score_slab(operands[0], 0, own, nothing, nothing);
            decode_second();
          }
          own = token_of(i, absent_pages, 1);
          own.scale_code = kJointSlabs > 1 && !(lane & 2) ? first_code : codes[1];
          const auto decode_next = [&] {
            if (kDecodesAhead && i + turns < job.tiles) decode_first();
          };
          score_slab(operands[kDecodesAhead ? 1 : 0], 1, own, decode_next, nothing);
        }
      }
      skip = i - job.tiles;
      device::arrive(query_empty(query_stage));  // every lane for itself: it read the job, and perhaps the weights
      query_ring.advance(1, plan.query_stages);
    }
  }
};

template <CacheFormat kFormat, int kHeadDim, int kHeads, int kSlots, int kGroups, int kBlocks, bool kOneSet>
__global__ void __launch_bounds__((kGroups + 1) * kGroupThreads, kBlocks)
    hopper_logits_kernel(const __grid_constant__ LogitsParams p, const __grid_constant__ CUtensorMap keys,
                         const __grid_constant__ CUtensorMap queries, const __grid_constant__ HopperPlan plan) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  const HopperKernel<kFormat, kHeadDim, kHeads, kSlots, kGroups, kBlocks, kOneSet> kernel(p, keys, queries, plan,
                                                                                          shared);

  if (kFormat == CacheFormat::kFp8 && threadIdx.x == 0) {
    device::prefetch_map(&keys);
    if (plan.query_boxes) device::prefetch_map(&queries);
  }
  kernel.init_barriers();
  kernel.prefetch_small_inputs();
  device::allow_next_kernel();
  __syncthreads();

  constexpr int kConsumerWarps = kGroups * kGroupThreads / kWarpThreads;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpThreads, 0);
  if (warp < kConsumerWarps) {
    // These see nothing, and so write nothing, before the helpers do.
    device::raise_registers<HopperTeam<kGroups, kBlocks>::kConsumerRegisters>();
    if (p.out_type == FloatType::kFloat32) {
      kernel.template consume<4>(warp / 4);
    } else {
      kernel.template consume<2>(warp / 4);
    }
  } else {
    device::lower_registers<HopperTeam<kGroups, kBlocks>::kHelperRegisters>();
    if (warp == kConsumerWarps + kProducer) return kernel.produce();
    device::wait_for_previous_kernel();
    switch (warp - kConsumerWarps) {
      case kQueryLoader:
      case kWeightLoader:
        if constexpr (kFormat == CacheFormat::kMxfp4) return kernel.load_mxfp4(warp - kConsumerWarps - kQueryLoader);
        return warp == kConsumerWarps + kQueryLoader ? kernel.load_queries() : kernel.load_weights();
      case kFiller:
        if (p.clean) fill_dead_columns<HopperTile<kFormat, kHeadDim>::kTokens>(p, blockIdx.x, gridDim.x);
    }
  }
#else
  __trap();  // launch() in hopper.cu lets only sm_90a code through
#endif
}

}  // namespace mqa::paged_logits
