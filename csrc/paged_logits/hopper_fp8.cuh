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
template <int kHeadDim, int kHeads, int kSlots, int kGroups, int kBlocks>
struct HopperKernel {
  static constexpr unsigned kTileTokens = kHopperTileTokens;
  static constexpr int kTileBytes = kHopperTileTokens * kHeadDim;
  static constexpr int kColumns = kSlots * kHeads;
  static constexpr int kAccumulators = kColumns / 2;         // per thread
  static constexpr int kWeightVectors = (kHeads + 15) / 16;  // of 16 bytes, per slot and lane of a quad
  static constexpr int kResults = (kSlots + 1) / 2;          // that a lane stores
  static constexpr bool kOneSet = kGroups < 4;
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
        turns(sets <= 2 ? kGroups / sets : 1),
        set_step(kGroups / turns) {}

  __device__ uint32_t values(int stage) const { return shared + stage * kTileBytes; }
  __device__ uint32_t scales(int stage) const { return shared + plan.scales + stage * (kHopperTileTokens * 4); }
  __device__ uint32_t absent(int stage) const { return shared + plan.absent + stage * 4; }  // bit per page of the tile
  __device__ uint32_t query(int stage) const { return shared + plan.queries + stage * plan.query_bytes; }
  // [slots][kWeightVectors][4 lanes of a quad][16 bytes]: the weights of a lane's columns, halved: relu_twice doubles.
  __device__ uint32_t weights(int stage) const {
    return shared + plan.weights + stage * sets * kSlots * (kWeightVectors * 64);
  }
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
    prefetch(p.q, (p.batch - 1) * p.q_batch_stride + kHeads * kHeadDim);
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
          part_shift(min(page_shift, 6)),
          part(lane & ((1 << (6 - part_shift)) - 1)),
          tile(lane >> (6 - part_shift)) {}
    __device__ int tokens() const { return 1 << part_shift; }
    // Of the burst's parts, a bit each, those of this lane's tile.
    __device__ unsigned of_tile(unsigned parts) const {
      return parts >> (tile << (6 - part_shift)) & ((1u << (1 << (6 - part_shift))) - 1);
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
    __device__ Pages(const LogitsParams& p, const RequestWalk<kHopperTileTokens>& walk, int lane)
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
  __device__ void produce_run(RequestWalk<kHopperTileTokens> walk, Pages pages, Progress& at) const {
    const Parts own(p.cache.block_shift, lane);
    const int part_bytes = own.tokens() * (kHeadDim + static_cast<int>(sizeof(float)));
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
          const uint8_t* page_scales = p.cache.data + page * p.cache.block_stride + p.cache.block_size * kHeadDim;
          // The copies are served in order: behind the values, the first tile's scales would wait for all of them.
          device::copy_bulk(scales(mine.stage) + in_tile * 4, page_scales + in_block * 4, own.tokens() * 4,
                            full(mine.stage), policy);
          device::copy_box(values(mine.stage) + in_tile * kHeadDim, &keys, 0, in_block, page, full(mine.stage), policy);
        }
        __syncwarp();
      }
      walk.next_request(p);
      if (!walk.done()) pages = Pages(p, walk, lane);
    }
  }

  // This block's share of the tiles.
  __device__ RequestWalk<kHopperTileTokens> own_share(const TileMap<kHopperTileTokens>& map) const {
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
      const TileMap<kHopperTileTokens> map(p);
      RequestWalk<kHopperTileTokens> walk = own_share(map);
      if (plan.guesses) device::wait_for_previous_kernel();
      Pages pages(p, walk, lane);
      if (plan.guesses) {
        const TileMap<kHopperTileTokens> now(p);
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
      const RequestWalk<kHopperTileTokens> walk(p, start(blockIdx.x), start(blockIdx.x + 1),
                                                kUnitTokens / kHopperTileTokens);
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

  template <FloatType kType>
  __device__ void load_weights_as(int request, uint32_t target) const {
    const int items = static_cast<int>(p.next_n) * kHeads;
#pragma unroll 2
    for (int item = lane; item < items; item += kWarpThreads) {
      const int head = item % kHeads;
      const int64_t row = int64_t{request} * p.next_n + item / kHeads;
      const float weight = device::load_float(p.weights, kType, row * p.weights_stride + head);
      const int vector = item / kHeads * kWeightVectors + head / 16;
      const int place = vector * 16 + head / 2 % 4 * 4 + head / 8 % 2 * 2 + head % 2;
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

  // -------------------------------------------------------------------------------------------------------------------
  // consumers: groups of four warps. Those of one set take turns at the tiles.
  // -------------------------------------------------------------------------------------------------------------------

  // What a lane must know of a request and a set: it stores the scores of one token for kResults slots, number
  // 2 k + (lane >> 1 & 1) of the set.
  struct Rows {
    uint32_t weights;
    float held_weights[kSlots][kHeldWeights];
    uint8_t* out[kResults];    // of the token in the request's first tile
    unsigned limit[kResults];  // columns below it are live,
    unsigned bound[kResults];  // below this they are written
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
      const int in_set = 2 * k + (lane >> 1 & 1);
      const int slot = set * kSlots + min(in_set, kSlots - 1);
      const bool stores = in_set < kSlots && slot < p.next_n;
      const auto limit = static_cast<unsigned>(device::load_shared_int(limits(query_stage) + slot * 4));
      rows.limit[k] = limit;
      rows.bound[k] = !stores ? 0 : p.clean ? static_cast<unsigned>(p.max_seq_len) : limit;
      rows.out[k] = static_cast<uint8_t*>(p.out) + ((request * p.next_n + slot) * p.out_stride + token) * kOutBytes;
      // Opaque to the compiler, which would else compute them anew for every tile.
      asm volatile("" : "+l"(rows.out[k]), "+r"(rows.bound[k]));
    }
  }

  __device__ void multiply(float (&scores)[kAccumulators], uint32_t tile_values, uint32_t set_queries) const {
    const device::MatrixDescriptor tokens(tile_values);
    const device::MatrixDescriptor heads(set_queries);
    device::pin(scores);
    device::matrix_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 32; ++k) {
      device::multiply<kColumns>(scores, tokens.at<kHeadDim>(k), heads.at<kHeadDim>(k), k > 0);
    }
    device::matrix_commit();
    device::matrix_wait<0>();
    device::pin(scores);
  }

  // max(x, 0) + max(x, 0), NaN kept: two full-rate operations where a maximum takes half-rate ones. A product of e4m3
  // rows is far from overflow.
  __device__ static float relu_twice(float x) { return x + fabsf(x); }

  // What a lane must know of the tile at hand.
  struct Tile {
    unsigned number;  // in the request
    unsigned column;  // of the lane's token
    bool absent;
    float scale;
  };

  // Sums over heads, in a lane and over the lanes of a quad; then the stores.
  template <int kOutBytes>
  __device__ void sum_and_store(const float (&scores)[kAccumulators], const Tile& tile, const Rows& rows) const {
    const bool odd = lane & 1;
    const bool upper = lane & 2;
    float halves[kSlots];  // of token g + 8 in odd lanes, of token g in even ones; the rest is two lanes away
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
      halves[slot] = (odd ? token_8 : token_0) + __shfl_xor_sync(~0u, odd ? token_0 : token_8, 1);
    }
#pragma unroll
    for (int k = 0; k < kResults; ++k) {
      // Two slots share the last step, where there are two.
      const int second = min(2 * k + 1, kSlots - 1);
      const float own = upper ? halves[second] : halves[2 * k];
      const float other = upper ? halves[2 * k] : halves[second];
      const float sum = own + __shfl_xor_sync(~0u, other, 2);
      if (tile.column < rows.bound[k]) {
        const float score = tile.column < rows.limit[k] && !tile.absent ? sum * tile.scale : -INFINITY;
        uint8_t* target = rows.out[k] + uint64_t{tile.number} * (kHopperTileTokens * kOutBytes);
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
    const int token = 16 * warp + lane / 4 + 8 * (lane & 1);  // whose scores this lane stores
    int token_page = 1 << (token >> min(p.cache.block_shift, 6));
    asm volatile("" : "+r"(token_page));  // as in load_rows
    const int first_set = group % set_step;
    const bool one_set = first_set < sets && sets <= set_step;  // for this group
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
      const Job next{words.x, words.y, __shfl_sync(~0u, words.z, 0)};
      if (next.tiles < 0) return;
      if (one_set && skip < next.tiles) load_rows<kOutBytes>(rows, next.request, query_stage, first_set, token);
      const uint32_t queries_at = query(query_stage) + first_set * (kColumns * kHeadDim);
      int i = skip;
#pragma unroll 1
      for (; i < next.tiles; i += turns) {
        device::wait(full(ring.stage), ring.parity);
        Tile tile;
        tile.number = static_cast<unsigned>(next.first_tile + i);
        tile.column = tile.number * kHopperTileTokens + token;
        tile.absent = (device::load_shared_int(absent(ring.stage)) & token_page) != 0;
        tile.scale = device::load_shared_float(scales(ring.stage) + token * 4);
        if (kOneSet || one_set) {
          multiply(scores, values(ring.stage), queries_at);
          release(empty(ring.stage));
          sum_and_store<kOutBytes>(scores, tile, rows);
        } else {
#pragma unroll 1
          for (int set = first_set; set < sets; set += set_step) {
            multiply(scores, values(ring.stage), query(query_stage) + set * (kColumns * kHeadDim));
            load_rows<kOutBytes>(rows, next.request, query_stage, set, token);
            sum_and_store<kOutBytes>(scores, tile, rows);
          }
          release(empty(ring.stage));
        }
        ring.advance(turns, plan.stages);
      }
      skip = i - next.tiles;
      device::arrive(query_empty(query_stage));  // every lane for itself: it read the job, and perhaps the weights
      query_ring.advance(1, plan.query_stages);
    }
  }
};

template <int kHeadDim, int kHeads, int kSlots, int kGroups, int kBlocks>
__global__ void __launch_bounds__((kGroups + 1) * kGroupThreads, kBlocks)
    hopper_fp8_logits_kernel(const __grid_constant__ LogitsParams p, const __grid_constant__ CUtensorMap keys,
                             const __grid_constant__ CUtensorMap queries, const __grid_constant__ HopperPlan plan) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  const HopperKernel<kHeadDim, kHeads, kSlots, kGroups, kBlocks> kernel(p, keys, queries, plan, shared);

  if (threadIdx.x == 0) {
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
      case kQueryLoader: return kernel.load_queries();
      case kWeightLoader: return kernel.load_weights();
      case kFiller:
        if (p.clean) fill_dead_columns<kHopperTileTokens>(p, blockIdx.x, gridDim.x);
    }
  }
#else
  __trap();  // launch() in hopper.cu lets only sm_90a code through
#endif
}

}  // namespace mqa::paged_logits
