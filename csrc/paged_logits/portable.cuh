// Paged logits from FP8 and MXFP4 caches for every architecture from sm_80 on and every supported shape.
//
// One block per worker walks its units of 256 tokens. K is the row operand of mma.sync (32 tokens per warp and step), q
// the column operand (8 heads per instruction), so a lane ends with its tokens' scores under a few heads and the sum
// over heads is a loop and two shuffles. Each warp owns a ring of stages filled by cp.async and never waits for another
// warp except when the block moves on to the next request and loads its q. All query slots of a request that fit in
// shared memory share one read of K.
//
// A dot product does not care about the order of its terms. So lane (g, c) takes 16 neighbouring bytes of a token as
// its operands for four (half: K = 16) or two (e4m3: K = 32) instructions, and q is stored in the same permuted order.
// Of an MXFP4 row 16 bytes are 32 elements, the ones of one scale.
//
// MXFP4 operands are halves, relative to the largest scale of the row's groups that are not zero: exact down to 2^-22
// of it. What is left of a row's scales is one power of two: a head's goes into its weight, together with a power for
// all heads that keeps the weights from overflowing; that and the token's are applied to the sum.
//
// Bits: a score depends on its own q, K, scale and weights alone. Heads are walked in order, and every other choice
// (work split, warps, stages, slots per pass) moves whole tiles about.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"
#include "device/float_types.cuh"
#include "device/mma.cuh"
#include "paged_logits/portable_config.h"
#include "paged_logits/rows.cuh"

namespace mqa::paged_logits {

// Architectures with an e4m3 matrix unit behind mma.sync. On sm_90 and sm_100 the instruction exists but is compiled to
// conversions in every step: converting once and multiplying halves is faster there.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
#define MQA_E4M3_MATRIX_UNIT 1
#else
#define MQA_E4M3_MATRIX_UNIT 0
#endif

template <CacheFormat kFormat, int kHeadDim>
struct PortableShape {
  static constexpr bool kFp8 = kFormat == CacheFormat::kFp8;
  static constexpr int kRowBytes = kFp8 ? kHeadDim : kHeadDim / 2;
  static constexpr int kLaneWords = kRowBytes / 16;  // 4-byte words of one row in one lane
  static constexpr bool kHalves = !kFp8 || !MQA_E4M3_MATRIX_UNIT;
  static constexpr int kWordRegisters = kFp8 ? (kHalves ? 2 : 1) : 4;  // operand registers that a word turns into
  static constexpr int kLaneRegisters = kLaneWords * kWordRegisters;   // of one row in one lane
  static constexpr int kVectors = (kLaneRegisters + 3) / 4;            // 16-byte vectors of q operands per lane
  static constexpr int kHeadTileBytes = kVectors * kWarpThreads * 16;  // q operands of 8 heads
  static constexpr int kChunkWords = kLaneWords < 4 ? kLaneWords : 4;  // that a lane loads at once
  static constexpr int kChunks = kLaneWords / kChunkWords;
};

// A lane's words of a row: chunk i is the (4 i + c)-th of the row. Chunks of 16 bytes are swizzled by `swizzle` (0 or
// 4).
template <typename Shape>
__device__ __forceinline__ void load_row_words(uint32_t (&words)[Shape::kLaneWords], const uint8_t* row, int c,
                                               int swizzle) {
  if constexpr (Shape::kChunkWords == 2) {
    const uint2 pair = *reinterpret_cast<const uint2*>(row + 8 * c);
    words[0] = pair.x;
    words[1] = pair.y;
  } else {
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
      const uint4 vector = *reinterpret_cast<const uint4*>(row + 16 * ((4 * chunk + c) ^ swizzle));
      words[4 * chunk + 0] = vector.x;
      words[4 * chunk + 1] = vector.y;
      words[4 * chunk + 2] = vector.z;
      words[4 * chunk + 3] = vector.w;
    }
  }
}

// Operand registers of a word of e4m3, in the order in which both operands use them.
__device__ __forceinline__ void expand_e4m3(uint32_t word, uint32_t* registers) {
#if MQA_E4M3_MATRIX_UNIT
  registers[0] = word;
#else
  registers[0] = device::half2_from_e4m3x2(word & 0xffff);
  registers[1] = device::half2_from_e4m3x2(word >> 16);
#endif
}

constexpr int kNoExponent = INT32_MIN;  // of a row that is zero or NaN

// How a lane's part of an MXFP4 row becomes halves. The four lanes of a quad share the row.
struct GroupScale {
  uint32_t factor;  // half2: 2^14 (what device::half2_from_e2m1x2 leaves) times the group's scale over the row's
  int exponent;     // the row's scale is 2^exponent; kNoExponent if the row is zero or NaN

  // `code` is the UE8M0 scale of the lane's elements. All lanes of the warp call.
  template <int kWords>
  __device__ GroupScale(const uint32_t (&words)[kWords], int code) {
    constexpr int kNan = 255, kBias = 127;
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) any |= words[i];
    int largest = code == kNan ? kNan : (any & 0x77777777u) != 0 ? code : -1;
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    exponent = largest < 0 || largest == kNan ? kNoExponent : largest - kBias;
    const int power = 14 + code - largest;           // of the factor
    const uint32_t half = largest == kNan ? 0x7e00u  // NaN, which 0 does not undo
                          : power > 14    ? 0u       // the group is zero
                          : power >= -14  ? static_cast<uint32_t>(power + 15) << 10
                          : power >= -24  ? 1u << (power + 24)
                                          : 0u;
    factor = half | half << 16;
  }
};

// Operand registers of a word of e2m1.
__device__ __forceinline__ void expand_e2m1(uint32_t word, uint32_t factor, uint32_t* registers) {
#pragma unroll
  for (int i = 0; i < 4; ++i) registers[i] = device::multiply_half2(device::half2_from_e2m1x2(word >> (8 * i)), factor);
}

// One instruction consumes two registers of each of two tokens (rows g and g + 8) and two of a head.
template <bool kHalves>
__device__ __forceinline__ void multiply(float (&scores)[4], const uint32_t* token, const uint32_t* token_8,
                                         uint32_t b0, uint32_t b1) {
  if constexpr (kHalves) {
    device::mma_half(scores, token[0], token_8[0], token[1], token_8[1], b0, b1);
  } else {
#if MQA_E4M3_MATRIX_UNIT
    device::mma_e4m3(scores, token[0], token_8[0], token[1], token_8[1], b0, b1);
#endif
  }
}

// The tiles that one warp scores, in order: for each request of the worker's range and each pass over its slots, every
// warps-th tile. All lanes hold the same values.
struct TileWalk : RequestWalk<kTileTokens> {
  int pass, tile;

  __device__ TileWalk(const LogitsParams& p, Position begin, Position last)
      : RequestWalk(p, begin, last, kTilesPerUnit), pass(0), tile(0) {}

  // Moves on to a tile of this warp, if there is one.
  __device__ void settle(const LogitsParams& p, int passes, int warp) {
    while (!done() && tile >= last_tile) {
      if (first_tile >= last_tile || ++pass >= passes) {
        next_request(p);
        pass = 0;
      }
      tile = first_tile + warp;
    }
  }
};

template <CacheFormat kFormat, int kHeadDim>
struct PortableKernel {
  using Shape = PortableShape<kFormat, kHeadDim>;
  using Stage = PortableStage<kFormat, kHeadDim>;
  static constexpr bool kFp8 = Shape::kFp8;
  static constexpr int kScaleBytes = Stage::kScaleBytes;

  const LogitsParams& p;
  const PortablePlan plan;
  uint8_t* q_operands;  // [slots][H / 8][vectors][32 lanes][16 bytes]
  float* head_weights;  // [slots][H]
  int* exponents;       // MXFP4: [slots][H] of the rows of q, then [slots]: of the slots' weights
  uint8_t* ring;        // this warp's stages
  int lane, warp, warps;

  // Page ids of the next tile to be fetched, one per half and lane; loaded a tile ahead because cp.async needs them.
  int32_t next_page;

  __device__ PortableKernel(const LogitsParams& params, const PortablePlan& launch, uint8_t* shared)
      : p(params),
        plan(launch),
        lane(threadIdx.x % kWarpThreads),
        warp(threadIdx.x / kWarpThreads),
        warps(blockDim.x / kWarpThreads),
        next_page(-1) {
    q_operands = shared;
    head_weights = reinterpret_cast<float*>(shared + plan.slots * (p.heads / 8) * Shape::kHeadTileBytes);
    exponents = reinterpret_cast<int*>(head_weights + plan.slots * p.heads);
    ring = shared + plan.ring + warp * plan.stages * Stage::kBytes;
  }

  __device__ void load_pages(const TileWalk& walk) {
    next_page = -1;
    if (walk.done()) return;
    const int64_t token = int64_t{walk.tile} * kTileTokens + (lane & kHalfTokens);
    // Tokens past the limit may have no column in the table.
    if (token < walk.limit) {
      next_page = __ldg(p.block_tables + walk.request * p.table_stride + (token >> p.cache.block_shift));
    }
  }

  // Starts the copies of the walk's tile into `stage` and moves the walk on. Always closes one group, so that the
  // groups can be counted.
  __device__ void fetch(TileWalk& walk, int stage_index) {
    if (!walk.done()) {
      uint8_t* stage = ring + stage_index * Stage::kBytes;
      const bool present = next_page >= 0 && next_page < p.cache.num_blocks;
      const int in_block =
          (walk.tile * kTileTokens + (lane & kHalfTokens)) & (static_cast<int>(p.cache.block_size) - 1);
      // Addresses of the half that this lane stands for; lanes 0 and 16 speak for the two halves.
      const uint8_t* block = p.cache.data + (present ? next_page * p.cache.block_stride : 0);
      const auto values = reinterpret_cast<uint64_t>(block + in_block * Shape::kRowBytes);
      // Interleaved scales of a half lie among those of the whole block, which are fetched instead.
      const bool whole = !kFp8 && p.cache.interleaved_scales;
      const auto scales = reinterpret_cast<uint64_t>(block + p.cache.block_size * Shape::kRowBytes +
                                                     (whole ? 0 : in_block * kScaleBytes));
      const unsigned halves = __ballot_sync(~0u, present);

      constexpr int kRowChunks = Shape::kRowBytes / 16;
      constexpr int kHalfChunks = kHalfTokens * kRowChunks;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint64_t half_values = __shfl_sync(~0u, values, half * kHalfTokens);
        const uint64_t half_scales = __shfl_sync(~0u, scales, half * kHalfTokens);
        if (!(halves >> (half * kHalfTokens) & 1)) continue;
#pragma unroll
        for (int chunk = lane; chunk < kHalfChunks; chunk += kWarpThreads) {
          const int row = half * kHalfTokens + chunk / kRowChunks;
          const int column = chunk % kRowChunks ^ row_swizzle(row);
          device::copy_async_16(stage + row * Shape::kRowBytes + column * 16,
                                reinterpret_cast<const uint8_t*>(half_values) + chunk * 16);
        }
        constexpr int kScaleChunks = kHalfTokens * kScaleBytes / 16;
        if (lane < (whole ? (half == 0 ? Stage::kInterleavedChunks : 0) : kScaleChunks)) {
          device::copy_async_16(stage + Stage::kScales + ((whole ? 0 : half * kScaleChunks) + lane) * 16,
                                reinterpret_cast<const uint8_t*>(half_scales) + lane * 16);
        }
      }
      if (lane == 0) {
        *reinterpret_cast<uint32_t*>(stage + Stage::kAbsent) = (halves & 1 ? 0 : 1) | (halves >> 16 & 1 ? 0 : 2);
      }
      walk.tile += warps;
      walk.settle(p, plan.passes, warp);
      load_pages(walk);
    }
    device::commit_copies();
  }

  // Rows of 128 bytes would put the same chunk of every row into the same banks.
  __device__ static int row_swizzle(int row) { return Shape::kRowBytes == 128 ? (row & 1) * 4 : 0; }

  // q and weights of the slots of one pass, by the whole block, which must be synchronised after it.
  __device__ void load_queries(int request, int first_slot, int slots) {
    constexpr int kChunkRegisters = Shape::kChunkWords * Shape::kWordRegisters;
    const int heads = static_cast<int>(p.heads);
    const int head_tiles = heads / 8;
    const int items = slots * head_tiles * Shape::kChunks * kWarpThreads;
#pragma unroll 4
    for (int item = threadIdx.x; item < items; item += blockDim.x) {
      const int item_lane = item % kWarpThreads;
      const int c = item_lane % 4;
      const int chunk = item / kWarpThreads % Shape::kChunks;
      const int head_tile = item / kWarpThreads / Shape::kChunks % head_tiles;
      const int slot = item / kWarpThreads / Shape::kChunks / head_tiles;
      const int head = head_tile * 8 + item_lane / 4;
      const uint8_t* source = p.q + request * p.q_batch_stride + (first_slot + slot) * p.q_slot_stride +
                              head * Shape::kRowBytes + (4 * chunk + c) * (4 * Shape::kChunkWords);
      uint32_t words[Shape::kChunkWords];
      if constexpr (Shape::kChunkWords == 2) {
        const uint2 pair = device::load_any<uint2>(source);
        words[0] = pair.x, words[1] = pair.y;
      } else {
        const uint4 vector = device::load_any<uint4>(source);
        words[0] = vector.x, words[1] = vector.y, words[2] = vector.z, words[3] = vector.w;
      }
      uint32_t registers[kChunkRegisters];
      if constexpr (kFp8) {
#pragma unroll
        for (int i = 0; i < Shape::kChunkWords; ++i) expand_e4m3(words[i], registers + i * Shape::kWordRegisters);
      } else {
        const uint32_t codes =
            p.q_scales[request * p.q_scales_batch_stride + (first_slot + slot) * p.q_scales_slot_stride + head];
        const GroupScale scale(words, codes >> (8 * (c * (kHeadDim / 32) / 4)) & 255);
#pragma unroll
        for (int i = 0; i < Shape::kChunkWords; ++i) {
          expand_e2m1(words[i], scale.factor, registers + i * Shape::kWordRegisters);
        }
        if (c == 0) exponents[slot * heads + head] = scale.exponent;
      }
      uint8_t* target = q_operands + (slot * head_tiles + head_tile) * Shape::kHeadTileBytes + item_lane * 16;
#pragma unroll
      for (int i = 0; i < kChunkRegisters; ++i) {
        const int index = chunk * kChunkRegisters + i;
        reinterpret_cast<uint32_t*>(target + index / 4 * kWarpThreads * 16)[index % 4] = registers[i];
      }
    }
    for (int item = threadIdx.x; item < slots * heads; item += blockDim.x) {
      const int64_t row = int64_t{request} * p.next_n + first_slot + item / heads;
      head_weights[item] = device::load_float(p.weights, p.weights_type, row * p.weights_stride + item % heads);
    }
    if constexpr (!kFp8) {
      __syncthreads();
      for (int slot = warp; slot < slots; slot += warps) normalise_weights(slot);
    }
  }

  // Weights times the powers of two of their rows of q, relative to a power that is no less than any of them. Weights
  // that are not finite stay; those of rows without an exponent, which multiply 0 or NaN, become 0 if they are finite.
  // By a warp.
  __device__ void normalise_weights(int slot) {
    const int heads = static_cast<int>(p.heads);
    float* weights = head_weights + slot * heads;
    const int* powers = exponents + slot * heads;
    int largest = kNoExponent;
    for (int head = lane; head < heads; head += kWarpThreads) {
      if (!isfinite(weights[head]) || weights[head] == 0.f || powers[head] == kNoExponent) continue;
      int exponent;
      frexpf(weights[head], &exponent);
      largest = max(largest, exponent + powers[head]);
    }
    largest = __reduce_max_sync(~0u, largest);
    for (int head = lane; head < heads; head += kWarpThreads) {
      if (!isfinite(weights[head])) continue;
      const bool vanishes = weights[head] == 0.f || powers[head] == kNoExponent;
      weights[head] = vanishes ? 0.f : ldexpf(weights[head], powers[head] - largest);
    }
    if (lane == 0) exponents[plan.slots * heads + slot] = largest == kNoExponent ? 0 : largest;
  }

  // Scores of 32 tokens under one slot: lane (g, c) returns that of token 8 c + g, before the token's scale.
  __device__ float score(const uint32_t (&tokens)[4][Shape::kLaneRegisters], int slot) const {
    const int c = lane % 4;
    const int head_tiles = static_cast<int>(p.heads / 8);
    const uint8_t* operands = q_operands + slot * head_tiles * Shape::kHeadTileBytes + lane * 16;
    const float* slot_weights = head_weights + slot * p.heads + 2 * c;
    float sums[4] = {0.f, 0.f, 0.f, 0.f};  // tokens g, g + 8, g + 16, g + 24

    for (int head_tile = 0; head_tile < head_tiles; head_tile += 2) {
      // Two head tiles at a time give the matrix unit four independent chains; H = 8 has one.
      const bool second = head_tile + 1 < head_tiles;
      float scores[2][2][4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == 1 && !second) break;
#pragma unroll
        for (int vector = 0; vector < Shape::kVectors; ++vector) {
          const uint4 b = *reinterpret_cast<const uint4*>(operands + (head_tile + i) * Shape::kHeadTileBytes +
                                                          vector * kWarpThreads * 16);
          const int at = 4 * vector;
          multiply<Shape::kHalves>(scores[i][0], &tokens[0][at], &tokens[1][at], b.x, b.y);
          multiply<Shape::kHalves>(scores[i][1], &tokens[2][at], &tokens[3][at], b.x, b.y);
          if (at + 2 < Shape::kLaneRegisters) {
            multiply<Shape::kHalves>(scores[i][0], &tokens[0][at + 2], &tokens[1][at + 2], b.z, b.w);
            multiply<Shape::kHalves>(scores[i][1], &tokens[2][at + 2], &tokens[3][at + 2], b.z, b.w);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == 1 && !second) break;
        const float2 w = *reinterpret_cast<const float2*>(slot_weights + (head_tile + i) * 8);
#pragma unroll
        for (int token = 0; token < 4; ++token) {
          const float* pair = &scores[i][token / 2][token % 2 * 2];
          sums[token] = fmaf(device::relu(pair[0]), w.x, sums[token]);
          sums[token] = fmaf(device::relu(pair[1]), w.y, sums[token]);
        }
      }
    }
#pragma unroll
    for (int token = 0; token < 4; ++token) {
      sums[token] += __shfl_xor_sync(~0u, sums[token], 1);
      sums[token] += __shfl_xor_sync(~0u, sums[token], 2);
    }
    return c == 0 ? sums[0] : c == 1 ? sums[1] : c == 2 ? sums[2] : sums[3];
  }

  // Scores the tile in `stage` for the slots of a pass and refills the stage with the tile that `ahead` points at.
  __device__ void score_tile(const TileWalk& walk, int first_slot, int slots, TileWalk& ahead, int stage_index) {
    const int g = lane / 4;
    const int c = lane % 4;
    const uint8_t* stage = ring + stage_index * Stage::kBytes;
    uint32_t tokens[4][Shape::kLaneRegisters];
    const int own = 8 * c + g;  // the token whose score this lane stores
    float scale = 1.f;
    int exponent = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t words[Shape::kLaneWords];
      const int row = 8 * i + g;
      load_row_words<Shape>(words, stage + row * Shape::kRowBytes, c, row_swizzle(row));
      if constexpr (kFp8) {
#pragma unroll
        for (int word = 0; word < Shape::kLaneWords; ++word) {
          expand_e4m3(words[word], &tokens[i][word * Shape::kWordRegisters]);
        }
      } else {
        const int first = walk.tile * kTileTokens & static_cast<int>(p.cache.block_size - 1);
        const int64_t place = p.cache.interleaved_scales ? p.cache.scale_place(first + row) : row;
        const GroupScale group(words, stage[Stage::kScales + place * kScaleBytes + c * kScaleBytes / 4]);
#pragma unroll
        for (int word = 0; word < Shape::kLaneWords; ++word) {
          expand_e2m1(words[word], group.factor, &tokens[i][word * Shape::kWordRegisters]);
        }
        if (i == c) exponent = group.exponent == kNoExponent ? 0 : group.exponent;
      }
    }
    if constexpr (kFp8) scale = reinterpret_cast<const float*>(stage + Stage::kScales)[own];
    const bool absent = *reinterpret_cast<const uint32_t*>(stage + Stage::kAbsent) >> (own / kHalfTokens) & 1;
    __syncwarp();  // every lane has read the stage
    fetch(ahead, stage_index);

    const int64_t column = int64_t{walk.tile} * kTileTokens + own;
    for (int slot = 0; slot < slots; ++slot) {
      float result = score(tokens, slot);
      if constexpr (kFp8) {
        result *= scale;
      } else {
        result = ldexpf(result, exponent + exponents[plan.slots * p.heads + slot]);
      }
      const int64_t row = int64_t{walk.request} * p.next_n + first_slot + slot;
      if (column < row_limit(p, walk.request, first_slot + slot)) {
        device::store_float(p.out, p.out_type, row * p.out_stride + column, absent ? -INFINITY : result);
      } else if (p.clean && column < p.max_seq_len) {
        device::store_float(p.out, p.out_type, row * p.out_stride + column, -INFINITY);
      }
    }
  }

  // The walk from `begin` up to `end`, which the whole block makes together.
  __device__ void score_range(Position begin, Position end) {
    TileWalk ahead(p, begin, end);
    ahead.tile = ahead.first_tile + warp;
    ahead.settle(p, plan.passes, warp);
    load_pages(ahead);
    for (int stage = 0; stage < plan.stages; ++stage) fetch(ahead, stage);

    int stage = 0;
    for (TileWalk walk(p, begin, end); !walk.done(); walk.next_request(p)) {
      if (walk.first_tile >= walk.last_tile) continue;
      for (int first_slot = 0; first_slot < p.next_n; first_slot += plan.slots) {
        const int slots = min(plan.slots, static_cast<int>(p.next_n) - first_slot);
        __syncthreads();  // the last request's q has been used
        load_queries(walk.request, first_slot, slots);
        __syncthreads();
        for (walk.tile = walk.first_tile + warp; walk.tile < walk.last_tile; walk.tile += warps) {
          if (plan.stages == 2)
            device::wait_copies<1>();
          else
            device::wait_copies<0>();
          __syncwarp();  // the other lanes' copies have landed too
          score_tile(walk, first_slot, slots, ahead, stage);
          stage = stage + 1 == plan.stages ? 0 : stage + 1;
        }
      }
    }
    device::wait_copies<0>();
  }
};

template <CacheFormat kFormat, int kHeadDim>
__global__ void __launch_bounds__(kPortableMaxWarps* kWarpThreads, 1)
    portable_logits_kernel(const __grid_constant__ LogitsParams p, const PortablePlan plan) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ ScanStorage scan;
  __shared__ Position starts[2];
  PortableKernel<kFormat, kHeadDim> kernel(p, plan, shared);

  const int batch = static_cast<int>(p.batch);
  const int64_t workers = p.schedule == nullptr ? int64_t{gridDim.x} : p.workers;
  for (int64_t worker = blockIdx.x; worker < workers; worker += gridDim.x) {
    if (p.schedule == nullptr) {
      worker_starts(
          batch, workers, worker, worker + 1,
          [&](int64_t request) { return units_of(request_limit(p, static_cast<int>(request))); },
          [&](int64_t i, Position start) { starts[i - worker] = start; }, scan);
    } else if (threadIdx.x < 2) {
      starts[threadIdx.x] = load_start(p.schedule, worker + threadIdx.x, workers, batch);
    }
    __syncthreads();
    const Position begin = starts[0];
    const Position end = starts[1];
    kernel.score_range(begin, end);
    __syncthreads();  // before the next worker's starts replace these
  }
  if (p.clean) {
    fill_dead_columns<kTileTokens>(p, static_cast<int>(blockIdx.x) * kernel.warps + kernel.warp,
                                   static_cast<int>(gridDim.x) * kernel.warps);
  }
}

}  // namespace mqa::paged_logits
