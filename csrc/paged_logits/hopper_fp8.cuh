// FP8 paged logits on Hopper (sm_90a), for every shape whose queries fit in shared memory.
//
// One block per multiprocessor takes an equal run of the tiles of 64 tokens of all requests. A producer warp walks the
// run and fetches K by bulk tensor copies (one box per page and tile, swizzled for the matrix unit) and the tokens'
// scales by bulk copies into a ring of stages; two more warps fetch each request's q and weights one request ahead.
// Groups of four warps score a tile each: wgmma with K as the row operand (64 tokens) and one query slot's heads as
// columns, both from shared memory, then the sum over heads in registers: two operations per product, two shuffles.
// With several slots the products of one overlap the sums of the one before; all slots share one read of K.
//
// The host asks for programmatic dependent launch: a block's set-up overlaps the end of the kernel in front.
//
// Only the producer looks at lengths to find its way, and hands the rest what it found: whatever is written to the
// inputs meanwhile, nobody waits for a tile that does not come.
//
// Accuracy: the fp8 matrix unit aligns the 32 products of a step to the largest and keeps about 13 bits.
//
// What paid: starting the copies of several tiles from as many lanes (four; eight start later, which small batches
// feel); scales ahead of values, or every tile of a burst waits for all of it; 32-bit shared addresses that the
// compiler cannot rebuild; no unrolled loops on the way to the first copy. What did not: two slots per instruction
// without overlap, three groups with more registers, a second producer, clusters of 8 (half of them do not fit at
// once), two blocks per multiprocessor in one to eight waves.
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

template <int kHeadDim, int kHeads>
struct HopperKernel {
  static constexpr int kTileBytes = kHopperTileTokens * kHeadDim;
  static constexpr int kAccumulators = kHeads / 2;           // per thread: a tile's scores under one slot
  static constexpr int kBuffers = kHeads <= 64 ? 2 : 1;      // sets of accumulators that the registers hold
  static constexpr int kWeightVectors = (kHeads + 15) / 16;  // of 16 bytes, per slot and lane of a quad

  const LogitsParams& p;
  const CUtensorMap& keys;     // [blocks][S][D]
  const CUtensorMap& queries;  // [B][n][H][D]
  const HopperPlan& plan;
  uint32_t shared;
  int lane;

  __device__ HopperKernel(const LogitsParams& params, const CUtensorMap& key_map, const CUtensorMap& query_map,
                          const HopperPlan& launch, const uint8_t* memory)
      : p(params),
        keys(key_map),
        queries(query_map),
        plan(launch),
        shared(device::shared_address(memory)),
        lane(static_cast<int>(threadIdx.x) % kWarpThreads) {}

  __device__ uint32_t values(int stage) const { return shared + stage * kTileBytes; }
  __device__ uint32_t scales(int stage) const { return shared + plan.scales + stage * (kHopperTileTokens * 4); }
  __device__ uint32_t info(int stage) const { return shared + plan.infos + stage * static_cast<int>(sizeof(TileInfo)); }
  __device__ uint32_t query(int stage) const { return shared + plan.queries + stage * plan.query_bytes; }
  // [slots][kWeightVectors][4 lanes of a quad][16 bytes]: the weights of a lane's columns, halved: relu_twice doubles.
  __device__ uint32_t weights(int stage) const {
    return shared + plan.weights + stage * static_cast<int>(p.next_n) * (kWeightVectors * 64);
  }
  __device__ uint32_t limits(int stage) const { return shared + plan.limits + stage * (kMaxSlots * 4); }
  __device__ uint32_t job(int slot) const { return shared + plan.jobs + slot * 4; }

  __device__ uint32_t full(int stage) const { return shared + plan.barriers + stage * 8; }
  __device__ uint32_t empty(int stage) const { return full(plan.stages + stage); }
  __device__ uint32_t query_full(int stage) const { return full(2 * plan.stages + stage); }
  __device__ uint32_t query_empty(int stage) const { return query_full(plan.query_stages + stage); }
  __device__ uint32_t job_full(int slot) const { return query_full(2 * plan.query_stages + slot); }
  __device__ uint32_t job_empty(int slot) const { return job_full(kJobs + slot); }

  // By the whole block, which must be synchronised after it.
  __device__ void init_barriers() const {
    constexpr int kGroupWarps = kGroupThreads / kWarpThreads;
    constexpr int kLoaderThreads = 2 * kWarpThreads;
    const int i = static_cast<int>(threadIdx.x);
    if (i < plan.stages) {
      device::init_barrier(full(i), 1);
      device::init_barrier(empty(i), kGroupWarps);
    } else if (i >= 128 && i < 128 + plan.query_stages) {
      device::init_barrier(query_full(i - 128), kLoaderThreads);
      device::init_barrier(query_empty(i - 128), kConsumerGroups * kGroupWarps);
    } else if (i >= 256 && i < 256 + kJobs) {
      device::init_barrier(job_full(i - 256), 1);
      device::init_barrier(job_empty(i - 256), kLoaderThreads);
    }
    device::fence_barrier_init();
  }

  // Lengths, block tables and queries of small batches, a line per thread of the whole grid: they will be needed one
  // after the other, and may then come from the L2 cache.
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
  }

  // -------------------------------------------------------------------------------------------------------------------
  // producer
  // -------------------------------------------------------------------------------------------------------------------

  __device__ Run own_run() const {
    const int batch = static_cast<int>(p.batch);
    if (p.schedule == nullptr) {
      return find_run(batch, gridDim.x, blockIdx.x, [&](int request) {
        return static_cast<int>((static_cast<unsigned>(request_limit(p, request)) + kHopperTileTokens - 1) /
                                kHopperTileTokens);
      });
    }
    const auto start = [&](int64_t block) {
      return load_start(p.schedule, block * p.workers / gridDim.x, p.workers, batch);
    };
    return {start(blockIdx.x), start(blockIdx.x + 1)};
  }

  // Hands a request to the loaders; -1 sends them home.
  __device__ void post_job(int sequence, int request) const {
    const int slot = sequence % kJobs;
    device::wait(job_empty(slot), (sequence / kJobs & 1) ^ 1);
    __syncwarp();  // once lane 0 has arrived, the barrier may move on under a lane that still waits
    if (lane == 0) {
      device::store_shared(job(slot), request);
      device::arrive(job_full(slot));
    }
  }

  // Table entry `column` of a request, or -1 where no live position needs it.
  __device__ int load_page(int request, int column, int limit) const {
    if (int64_t{column} << p.cache.block_shift >= limit) return -1;
    return __ldg(p.block_tables + request * p.table_stride + column);
  }

  __device__ void produce() const {
    const Run run = own_run();
    const int tiles_per_unit = p.schedule == nullptr ? 1 : kUnitTokens / kHopperTileTokens;
    const int block_shift = p.cache.block_shift;
    const int part_shift = min(block_shift, 6);  // a part is what a tile has of a page
    const int part_tokens = 1 << part_shift;
    const int parts_shift = 6 - part_shift;
    const int part_bytes = part_tokens * (kHeadDim + static_cast<int>(sizeof(float)));
    const unsigned tile_parts = (1u << (1 << parts_shift)) - 1;
    // A lane starts the copies of one part of one of the burst's tiles.
    const int part = lane & ((1 << parts_shift) - 1);
    const int own_tile = lane >> parts_shift;

    RingPosition ring{0, 1};
    int sequence = -1;
    for (RequestWalk<kHopperTileTokens> walk(p, run.begin, run.end, tiles_per_unit); !walk.done();
         walk.next_request(p)) {
      if (walk.first_tile >= walk.last_tile) continue;
      post_job(++sequence, walk.request);
      // Each lane holds an entry of two windows of the table: 32 from `window` on, and the 32 after those.
      int window = static_cast<int>(int64_t{walk.first_tile} * kHopperTileTokens >> block_shift);
      int pages = load_page(walk.request, window + lane, walk.limit);
      int next_pages = load_page(walk.request, window + kWarpThreads + lane, walk.limit);
#pragma unroll 1
      for (int first = walk.first_tile; first < walk.last_tile; first += kBurst) {
        const int count = min(kBurst, walk.last_tile - first);
        const int64_t token = int64_t{first + own_tile} * kHopperTileTokens + part * part_tokens;
        const int entry = static_cast<int>(token >> block_shift) - window;
        int page = __shfl_sync(~0u, pages, entry);
        if (__any_sync(~0u, own_tile < count && entry >= kWarpThreads)) {
          const int later_page = __shfl_sync(~0u, next_pages, entry);
          if (entry >= kWarpThreads) page = later_page;
        }
        if (static_cast<int>(int64_t{first + kBurst} * kHopperTileTokens >> block_shift) - window >= kWarpThreads) {
          window += kWarpThreads;
          pages = next_pages;
          next_pages = load_page(walk.request, window + kWarpThreads + lane, walk.limit);
        }
        const bool present = own_tile < count && page >= 0 && page < p.cache.num_blocks;
        const unsigned all_present = __ballot_sync(~0u, present);
        RingPosition mine = ring;
        mine.advance(own_tile, plan.stages);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
          device::wait(empty(ring.stage), ring.parity);
          __syncwarp();  // as in post_job
          if (lane == 0) {
            const unsigned tile_present = all_present >> (i << parts_shift) & tile_parts;
            device::store_shared(info(ring.stage),
                                 int4{walk.request, first + i, sequence, static_cast<int>(~tile_present)});
            device::arrive_expecting(full(ring.stage), __popc(tile_present) * part_bytes);
          }
          ring.advance(1, plan.stages);
        }
        __syncwarp();
        if (present) {
          const int in_block = static_cast<int>(token) & (static_cast<int>(p.cache.block_size) - 1);
          const uint8_t* page_scales = p.cache.data + page * p.cache.block_stride + p.cache.block_size * kHeadDim;
          // The copies are served in order: behind the values, the first tile's scales would wait for all of them.
          device::copy_bulk(scales(mine.stage) + part * part_tokens * 4, page_scales + in_block * 4, part_tokens * 4,
                            full(mine.stage));
          device::copy_box(values(mine.stage) + part * part_tokens * kHeadDim, &keys, 0, in_block, page,
                           full(mine.stage));
        }
        __syncwarp();
      }
    }
    post_job(sequence + 1, -1);
#pragma unroll 1
    for (int group = 0; group < kConsumerGroups; ++group) {
      device::wait(empty(ring.stage), ring.parity);
      if (lane == 0) {
        device::store_shared(info(ring.stage), int4{-1, 0, sequence, 0});
        device::arrive(full(ring.stage));
      }
      ring.advance(1, plan.stages);
    }
  }

  // -------------------------------------------------------------------------------------------------------------------
  // loaders
  // -------------------------------------------------------------------------------------------------------------------

  // load(request, stage) for each of the producer's jobs.
  template <typename Load>
  __device__ void serve_jobs(const Load& load) const {
    RingPosition ring{0, 1};
#pragma unroll 1
    for (int sequence = 0;; ++sequence) {
      const int slot = sequence % kJobs;
      device::wait(job_full(slot), sequence / kJobs & 1);
      const int request = device::load_shared_int(job(slot));
      device::arrive(job_empty(slot));
      if (request < 0) return;
      device::wait(query_empty(ring.stage), ring.parity);
      load(request, ring.stage);
      device::fence_async_proxy();
      device::arrive(query_full(ring.stage));
      ring.advance(1, plan.query_stages);
    }
  }

  __device__ void load_queries() const {
    constexpr int kSlotBytes = kHeads * kHeadDim;
    const int next_n = static_cast<int>(p.next_n);
    serve_jobs([&](int request, int stage) {
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
    serve_jobs([&](int request, int stage) {
      if (lane < p.next_n) device::store_shared(limits(stage) + lane * 4, row_limit(p, request, lane));
      switch (p.weights_type) {
        case FloatType::kBFloat16: return load_weights_as<FloatType::kBFloat16>(request, weights(stage));
        case FloatType::kFloat16: return load_weights_as<FloatType::kFloat16>(request, weights(stage));
        default: return load_weights_as<FloatType::kFloat32>(request, weights(stage));
      }
    });
  }

  // -------------------------------------------------------------------------------------------------------------------
  // consumers: groups of four warps that score every kConsumerGroups-th tile
  // -------------------------------------------------------------------------------------------------------------------

  // What a lane must know of the tile at hand.
  struct Tile {
    uint32_t values;
    uint32_t query, weights, limits;  // of slot 0
    int stage;
    unsigned column;  // of the token whose score this lane stores
    uint8_t* out;     // where, for slot 0
    int64_t slot_bytes;
    float scale;
    bool absent;
  };

  __device__ void start(float (&scores)[kAccumulators], const Tile& tile, int slot) const {
    const device::MatrixDescriptor tokens(tile.values);
    const device::MatrixDescriptor heads(tile.query + slot * (kHeads * kHeadDim));
    device::pin(scores);
    device::matrix_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 32; ++k) {
      device::multiply<kHeads>(scores, tokens.at<kHeadDim>(k), heads.at<kHeadDim>(k), k > 0);
    }
    device::matrix_commit();
    device::pin(scores);
  }

  // max(x, 0) + max(x, 0), NaN kept: two full-rate operations where a maximum takes half-rate ones. A product of e4m3
  // rows is far from overflow.
  __device__ static float relu_twice(float x) { return x + fabsf(x); }

  // A slot's sums over heads, reduced over pairs of lanes: of token g + 8 in odd lanes, of token g in even ones. The
  // other half is in the lane whose number differs in bit 1.
  __device__ float half_sum(const float (&scores)[kAccumulators], const Tile& tile, int slot) const {
    const uint32_t slot_weights = tile.weights + slot * (kWeightVectors * 64);
    float sums[4] = {0.f, 0.f, 0.f, 0.f};  // even and odd columns of token g, then of token g + 8
#pragma unroll
    for (int vector = 0; vector < kWeightVectors; ++vector) {
      const int4 bits = device::load_shared_int4(slot_weights + vector * 64);
      const float w[4] = {__int_as_float(bits.x), __int_as_float(bits.y), __int_as_float(bits.z),
                          __int_as_float(bits.w)};
#pragma unroll
      for (int j = 0; j < (kHeads < 16 ? 1 : 2); ++j) {
        const float* d = scores + 8 * vector + 4 * j;
        sums[0] = fmaf(relu_twice(d[0]), w[2 * j], sums[0]);
        sums[1] = fmaf(relu_twice(d[1]), w[2 * j + 1], sums[1]);
        sums[2] = fmaf(relu_twice(d[2]), w[2 * j], sums[2]);
        sums[3] = fmaf(relu_twice(d[3]), w[2 * j + 1], sums[3]);
      }
    }
    const float token_0 = sums[0] + sums[1];
    const float token_8 = sums[2] + sums[3];
    const bool odd_lane = lane & 1;
    return (odd_lane ? token_8 : token_0) + __shfl_xor_sync(~0u, odd_lane ? token_0 : token_8, 1);
  }

  __device__ void store(const Tile& tile, int slot, float sum) const {
    const auto limit = static_cast<unsigned>(device::load_shared_int(tile.limits + slot * 4));
    const bool live = tile.column < limit;
    if (!live && !(p.clean && tile.column < p.max_seq_len)) return;
    const float score = live && !tile.absent ? sum * tile.scale : -INFINITY;
    uint8_t* target = tile.out + slot * tile.slot_bytes;
    if (p.out_type == FloatType::kFloat32) {
      *reinterpret_cast<float*>(target) = score;
    } else {
      device::store_float(target, p.out_type, 0, score);
    }
  }

  __device__ void store_one(const Tile& tile, int slot, float half) const {
    const float sum = half + __shfl_xor_sync(~0u, half, 2);
    if (!(lane & 2)) store(tile, slot, sum);
  }

  // Two slots share the last step of the reduction and the store.
  __device__ void store_pair(const Tile& tile, int slot, float half, float next_half) const {
    const bool next = lane & 2;
    const float sum = (next ? next_half : half) + __shfl_xor_sync(~0u, next ? half : next_half, 2);
    store(tile, slot + (next ? 1 : 0), sum);
  }

  __device__ void release(const Tile& tile) const {
    __syncwarp();  // every lane has read the stage
    if (lane == 0) device::arrive(empty(tile.stage));
  }

  // The products of a slot overlap the sums of the one before; those of one group's tile overlap the other groups'.
  __device__ void score(const Tile& tile) const {
    const int next_n = static_cast<int>(p.next_n);
    float scores[kAccumulators];
    if constexpr (kBuffers == 1) {
#pragma unroll 1
      for (int slot = 0; slot < next_n; ++slot) {
        start(scores, tile, slot);
        device::matrix_wait<0>();
        device::pin(scores);
        if (slot + 1 == next_n) release(tile);
        store_one(tile, slot, half_sum(scores, tile, slot));
      }
    } else {
      float others[kAccumulators];
      start(scores, tile, 0);
      int slot = 0;
#pragma unroll 1
      for (; slot + 2 < next_n; slot += 2) {
        start(others, tile, slot + 1);
        device::matrix_wait<1>();
        device::pin(scores);
        const float half = half_sum(scores, tile, slot);
        start(scores, tile, slot + 2);
        device::matrix_wait<1>();
        device::pin(others);
        store_pair(tile, slot, half, half_sum(others, tile, slot + 1));
      }
      if (slot + 2 == next_n) {
        start(others, tile, slot + 1);
        device::matrix_wait<1>();
        device::pin(scores);
        const float half = half_sum(scores, tile, slot);
        device::matrix_wait<0>();
        device::pin(others);
        release(tile);
        store_pair(tile, slot, half, half_sum(others, tile, slot + 1));
      } else {
        device::matrix_wait<0>();
        device::pin(scores);
        release(tile);
        store_one(tile, slot, half_sum(scores, tile, slot));
      }
    }
  }

  __device__ void consume(int group) const {
    const int warp = static_cast<int>(threadIdx.x) / kWarpThreads % 4;
    const int token = 16 * warp + lane / 4 + 8 * (lane & 1);  // whose score this lane stores
    const int token_part = token >> min(p.cache.block_shift, 6);
    const int out_shift = p.out_type == FloatType::kFloat32 ? 2 : 1;
    const int64_t request_stride = p.next_n * p.out_stride;
    RingPosition ring{group, 0};
    RingPosition query_ring{-1, 0};
    int sequence = -1;
#pragma unroll 1
    while (true) {
      device::wait(full(ring.stage), ring.parity);
      const int4 words = device::load_shared_int4(info(ring.stage));
      const TileInfo next{words.x, words.y, words.z, words.w};
      // Every request is waited for and released, also one that leaves this group no tile.
#pragma unroll 1
      while (sequence < next.query) {
        if (sequence >= 0) {
          __syncwarp();  // every lane has read the weights
          if (lane == 0) device::arrive(query_empty(query_ring.stage));
        }
        query_ring.advance(1, plan.query_stages);
        device::wait(query_full(query_ring.stage), query_ring.parity);
        ++sequence;
      }
      if (next.request < 0) return;
      Tile tile;
      tile.values = values(ring.stage);
      tile.query = query(query_ring.stage);
      tile.weights = weights(query_ring.stage) + lane % 4 * 16;
      tile.limits = limits(query_ring.stage);
      tile.stage = ring.stage;
      tile.column = static_cast<unsigned>(next.tile) * kHopperTileTokens + token;
      tile.out = static_cast<uint8_t*>(p.out) + ((next.request * request_stride + tile.column) << out_shift);
      tile.slot_bytes = p.out_stride << out_shift;
      tile.scale = device::load_shared_float(scales(ring.stage) + token * 4);
      tile.absent = (next.absent >> token_part & 1) != 0;
      score(tile);
      ring.advance(kConsumerGroups, plan.stages);
    }
  }
};

template <int kHeadDim, int kHeads>
__global__ void __launch_bounds__(kHopperThreads, 1)
    hopper_fp8_logits_kernel(const __grid_constant__ LogitsParams p, const __grid_constant__ CUtensorMap keys,
                             const __grid_constant__ CUtensorMap queries, const __grid_constant__ HopperPlan plan) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  const HopperKernel<kHeadDim, kHeads> kernel(p, keys, queries, plan, shared);

  if (threadIdx.x == 0) {
    device::prefetch_map(&keys);
    if (plan.query_boxes) device::prefetch_map(&queries);
  }
  kernel.init_barriers();
  kernel.prefetch_small_inputs();
  device::allow_next_kernel();
  device::wait_for_previous_kernel();
  __syncthreads();

  constexpr int kConsumerWarps = kConsumerGroups * kGroupThreads / kWarpThreads;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpThreads, 0);
  if (warp < kConsumerWarps) {
    device::raise_registers<kConsumerRegisters>();
    kernel.consume(warp / 4);
  } else {
    device::lower_registers<kHelperRegisters>();
    switch (warp - kConsumerWarps) {
      case kProducer: return kernel.produce();
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
