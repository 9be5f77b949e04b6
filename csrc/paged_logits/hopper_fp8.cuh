// FP8 paged logits on Hopper: q, weights and the consumers. hopper_block.cuh has the rest.
//
// K and q come swizzled for the matrix unit, which takes both from shared memory; then the sum over heads in registers,
// two operations per product.
//
// What bounds it: up to 64 columns the read of K, at 128 nearly so. Beyond, a tile of 256 columns takes its two groups
// 830 clocks where the matrix unit needs 512: a group's sums take 1,100 (400 instructions, which the register file
// serves more slowly while products are under way), its products 540; and the card lowers its clock, to 1.65 GHz.
//
// Accuracy: the fp8 matrix unit aligns the 32 products of a step to the largest and keeps about 13 bits.
//
// What paid: scales ahead of values, or every tile of a burst waits for all of it; addresses and bounds that the
// compiler cannot rebuild per tile; weights held in registers (shared memory, busy with the products, makes 256 columns
// a tenth slower). What did not: products of the next tile started before the sums of one (two sets of accumulators;
// more warps hide as much), 64 columns per instruction where there are more (both operands come from shared memory, at
// all its rate; K from registers costs more instructions), a slot instead of a tile per group, a maximum or a
// predicated sum for x + |x|. Untried in earnest: sum w relu(x) = (sum w x + sum w |x|) / 2 with the first sum from a
// few more columns (w folded into q, in pieces) leaves one operation per product; with it for nothing, 128 columns took
// 3 to 8 % less time and 256 took 10 % less.
#pragma once

#include "device/float_types.cuh"
#include "device/wgmma.cuh"
#include "paged_logits/hopper_block.cuh"

namespace mqa::paged_logits {

// One set: the groups take turns at the tiles, and a lane holds its weights in registers.
// kOutBytes, below: of a result; a branch per result is felt where the sums are the bound.
template <int kHeadDim, int kHeads, int kSlots, int kGroups, bool kOneSet>
struct HopperFp8 : HopperBlock<CacheFormat::kFp8, kHeadDim, kHeads, kSlots, kGroups, kOneSet> {
  using Block = HopperBlock<CacheFormat::kFp8, kHeadDim, kHeads, kSlots, kGroups, kOneSet>;
  using Block::absent;
  using Block::Block;
  using Block::empty;
  using Block::full;
  using Block::lane;
  using Block::limits;
  using Block::p;
  using Block::plan;
  using Block::queries;
  using Block::query;
  using Block::query_empty;
  using Block::query_full;
  using Block::query_job;
  using Block::release;
  using Block::scales;
  using Block::serve_jobs;
  using Block::set_step;
  using Block::sets;
  using Block::turns;
  using Block::values;
  static constexpr int kColumns = Block::kColumns;
  static constexpr int kAccumulators = kColumns / 2;             // per thread
  static constexpr int kWeightVectors = (kHeads + 15) / 16;      // of 16 bytes, per slot and lane of a quad
  static constexpr int kResults = (kSlots + 1) / 2;              // that a lane stores
  static constexpr int kHeldWeights = kOneSet ? kHeads / 4 : 1;  // per slot

  // [slots][kWeightVectors][4 lanes of a quad][16 bytes]: the weights of a lane's columns, halved: relu_twice doubles.
  __device__ uint32_t weights(int stage) const {
    return this->shared + plan.weights + stage * sets * kSlots * (kWeightVectors * 64);
  }

  // By one of the two loaders.
  __device__ void load(int loader) const { loader == 0 ? load_queries() : load_weights(); }

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
        uint8_t* target = rows.out[k] + uint64_t{tile.number} * (kMatrixRows * kOutBytes);
        __builtin_assume(__isGlobal(target));  // forgotten when it was made opaque
        if constexpr (kOutBytes == 4) {
          *reinterpret_cast<float*>(target) = score;
        } else {
          device::store_float(target, p.out_type, 0, score);
        }
      }
    }
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
        tile.column = tile.number * kMatrixRows + token;
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

}  // namespace mqa::paged_logits
