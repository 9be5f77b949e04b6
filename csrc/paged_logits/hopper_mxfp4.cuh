// MXFP4 paged logits on Hopper: q, weights and the consumers. hopper_block.cuh has the rest.
//
// A consumer decodes K into operands in registers (mxfp4_rows.cuh), one scale and 32 neighbouring elements of a token
// to a lane, and q lies in shared memory in the same order of elements. The products' sums are halves, which is enough
// for a rectifier: packed in pairs they are the operands, in just the right places, of a second product, with the
// weights as columns, in float32. So the sum over heads costs half an operation per score where FP8's costs two. A
// weight is the sum of two halves, in two columns. The columns of several slots share that product: a lane ends with
// the scores of one slot.
//
// The powers of two left over are those of a head's row of q, which go into its weight; of a slot's weights, which are
// taken relative to one that none exceeds; and of a token. The last two are applied to the sum, so that nothing on the
// way overflows where the result does not.
#pragma once

#include "device/float_types.cuh"
#include "device/mma.cuh"
#include "device/wgmma.cuh"
#include "paged_logits/hopper_block.cuh"
#include "paged_logits/mxfp4_rows.cuh"

namespace mqa::paged_logits {

template <int kHeadDim, int kHeads, int kSlots, int kGroups, bool kOneSet>
struct HopperMxfp4 : HopperBlock<CacheFormat::kMxfp4, kHeadDim, kHeads, kSlots, kGroups, kOneSet> {
  using Block = HopperBlock<CacheFormat::kMxfp4, kHeadDim, kHeads, kSlots, kGroups, kOneSet>;
  using Block::absent;
  using Block::Block;
  using Block::empty;
  using Block::full;
  using Block::lane;
  using Block::limits;
  using Block::p;
  using Block::plan;
  using Block::query;
  using Block::query_empty;
  using Block::query_full;
  using Block::query_job;
  using Block::release;
  using Block::serve_jobs;
  using Block::sets;
  using Block::turns;
  using Block::values;
  static constexpr int kColumns = Block::kColumns;
  static constexpr int kValueBytes = Block::kValueBytes;
  static constexpr int kScaleBytes = Block::kScaleBytes;
  static constexpr int kTileShift = Block::kTileShift;
  static constexpr int kTileTokens = Block::kTileTokens;
  static_assert(kTileTokens == 2 * kMatrixRows && kColumns % 16 == 0);

  using Part = Mxfp4Part<kHeadDim>;
  static constexpr int kSteps = kHeadDim / 32;       // of products
  static constexpr int kHeadBlocks = kColumns / 16;  // steps of the second product
  static constexpr int kLoWeightPower = 11;          // of the second half of a weight

  // A quad's lanes have kPlaces slots between them, and if these are fewer than four, different tokens of a slot.
  static constexpr int kPlaces = kSlots == 3 ? 4 : kSlots;
  static_assert(kPlaces == 1 || kPlaces == 2 || kPlaces == 4);
  static_assert(kOneSet || kPlaces > 1);

  __device__ uint32_t powers(int stage) const { return this->shared + plan.powers + stage * (kMaxSlots * 4); }
  // [slots][first and second halves][H], two bytes each.
  __device__ uint32_t weights(int stage) const {
    return this->shared + plan.weights + stage * sets * kSlots * (max(kHeads, 16) * 4);
  }
  __device__ uint32_t slot_weights(int stage, int slot) const { return weights(stage) + slot * (kHeads * 4); }

  // -------------------------------------------------------------------------------------------------------------------
  // loaders
  // -------------------------------------------------------------------------------------------------------------------

  // q as e4m3 and weights, by both loaders. Four lanes have a row; what they copy lies where its e4m3 codes will be, so
  // that all rows can be under way at once. Slots that only fill up a set are zero.
  __device__ void load(int loader) const {
    constexpr int kLoaders = 2;
    constexpr int kStep = kLoaders * kWarpThreads / 4;  // of a lane's rows
    const int next_n = static_cast<int>(p.next_n);
    const int first_row = (loader * kWarpThreads + lane) / 4;
    const int quarter = lane % 4;
    const auto layout = reinterpret_cast<uint64_t>(p.q) | p.q_batch_stride | p.q_slot_stride;
    const bool aligned = layout % 16 == 0;
    serve_jobs([&](const Job& next, int stage) {
      if (loader == 0 && lane == 0) {
        device::store_shared(query_job(stage), int4{next.request, next.first_tile, next.tiles, 0});
      }
      if (next.tiles < 0) return;
      const uint8_t* q = p.q + next.request * p.q_batch_stride;
      const uint32_t* q_scales = p.q_scales + next.request * p.q_scales_batch_stride;
      const uint32_t raw = query(stage) + quarter * Part::kBytes;
      const uint32_t raw_scales = query(stage) + 4 * Part::kBytes + quarter * 4;
#pragma unroll 1
      for (int row = first_row; row < next_n * kHeads; row += kStep) {
        const int slot = row / kHeads, head = row % kHeads;
        const uint8_t* part = q + slot * p.q_slot_stride + head * kValueBytes + quarter * Part::kBytes;
        Part::copy(raw + row * kHeadDim, part, aligned);
        device::copy_async<4>(raw_scales + row * kHeadDim, q_scales + slot * p.q_scales_slot_stride + head);
      }
      device::commit_copies();
      int slot = kLoaders - 1 - loader;
      Mxfp4Weights<kHeads> own;
      if (slot < next_n) own.load(p, next.request, slot, lane);
      if (loader == 0 && lane < next_n) {
        device::store_shared(limits(stage) + lane * 4, row_limit(p, next.request, lane));
      }
      device::wait_copies<0>();
#pragma unroll 1
      for (int row = first_row; row < sets * kSlots * kHeads; row += kStep) {
        Part part{};
        MagnitudeTable table{0, 0};
        if (row / kHeads < next_n) {
          part.load(raw + row * kHeadDim);
          part.row_scales = device::load_shared_int(raw_scales + row * kHeadDim);
          table = part.query_table(quarter);
        }
        __syncwarp();  // the lanes of the row have read it
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          uint32_t x, y;
          table.expand(part.words[k], x, y);
          const int at = row * kHeadDim + k * 32 + quarter * 4;
          device::store_shared(query(stage) + device::swizzle<kHeadDim>(at), static_cast<int>(x));
          device::store_shared(query(stage) + device::swizzle<kHeadDim>(at + 16), static_cast<int>(y));
        }
      }
#pragma unroll 1
      for (; slot < sets * kSlots; slot += kLoaders) {
        if (slot < next_n) {
          const int power = own.template normalise<kHeadDim>(q + slot * p.q_slot_stride, lane);
          if (lane == 0) device::store_shared(powers(stage) + slot * 4, power);
        }
#pragma unroll
        for (int i = 0; i < own.kLaneHeads; ++i) {
          const int head = lane + i * kWarpThreads;
          const float weight = slot < next_n ? own.weight[i] : 0.f;
          const __half first = __float2half_rn(weight);
          const float rest = (weight - __half2float(first)) * (1 << kLoWeightPower);
          const __half second = __float2half_rn(isfinite(weight) ? rest : 0.f);
          if (head < kHeads) {
            device::store_shared_half(slot_weights(stage, slot) + head * 2, first);
            device::store_shared_half(slot_weights(stage, slot) + (kHeads + head) * 2, second);
          }
        }
        if (slot + kLoaders < next_n) own.load(p, next.request, slot + kLoaders, lane);
      }
    });
  }

  // -------------------------------------------------------------------------------------------------------------------
  // consumers: groups of four warps, which take turns at the tiles
  // -------------------------------------------------------------------------------------------------------------------

  // Where a lane's part of a tile lies in its stage: rows g and g + 8 of its warp's 16 in each slab. A row is in the
  // page of its neighbours, so that these are a fixed step away.
  struct Places {
    int values, scales;  // of the first row
    int slab_values, slab_scales, half_scales;

    __device__ Places(const PagedCache& cache, int row, int c) {
      const int shift = min(cache.block_shift, kTileShift);
      const int tokens = 1 << shift;
      const int page = (row >> shift) * tokens * (kValueBytes + kScaleBytes);
      const int in_page = row & (tokens - 1);
      const bool split = shift < kTileShift;  // slabs are in different pages
      values = page + in_page * kValueBytes + c * Part::kBytes;
      slab_values = kMatrixRows * (kValueBytes + (split ? kScaleBytes : 0));
      const int place = cache.interleaved_scales ? 4 * (in_page % 32) + in_page / 32 : in_page;
      scales = page + tokens * kValueBytes + place * kScaleBytes + c * kScaleBytes / 4;
      slab_scales = split ? slab_values : (cache.interleaved_scales ? 2 : kMatrixRows) * kScaleBytes;
      half_scales = (cache.interleaved_scales ? 32 : 8) * kScaleBytes;
    }
  };

  // A slab as the matrix instruction wants it, and the scale codes that rows g and g + 8 are relative to.
  struct Slab {
    uint32_t operands[kSteps]
                     [4];  // of a step: rows g and g + 8, each first bytes 4 c to 4 c + 3, then those 16 further
    int scales[2];
  };

  // `reference` is a scale code that has served the warp before: as long as all scales are near below it, all rows are
  // relative to that. Which it is does not show in the result: all else is exact.
  __device__ void decode(Slab& slab, const Places& places, uint32_t tile, int number, int& reference) const {
    int codes[2];
    Part part[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      codes[half] =
          device::load_shared_byte(tile + places.scales + number * places.slab_scales + half * places.half_scales);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      part[half].load(tile + places.values + number * places.slab_values + half * (8 * kValueBytes));
    }
    const auto near = [&](int code) {
      return __all_sync(~0u, static_cast<unsigned>(code - codes[0]) <= kKeyWindow &&
                                 static_cast<unsigned>(code - codes[1]) <= kKeyWindow);
    };
    const auto table = [&](int half) { return normal_table(kKeyPower + codes[half] - reference); };
    MagnitudeTable tables[2] = {table(0), table(1)};
    slab.scales[0] = slab.scales[1] = reference;
    if (!near(reference)) {
      const int largest = __reduce_max_sync(~0u, max(codes[0], codes[1]));
      if (largest != kNanScale && near(largest)) {
        slab.scales[0] = slab.scales[1] = reference = largest;
        tables[0] = table(0);
        tables[1] = table(1);
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          slab.scales[half] = Part::row_scale(part[half].any(), codes[half]);
          tables[half] = key_table(codes[half], slab.scales[half]);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        tables[half].expand(part[half].words[k], slab.operands[k][half], slab.operands[k][2 + half]);
      }
    }
    // Now, not when they are used.
#pragma unroll
    for (int k = 0; k < kSteps; ++k) device::pin(slab.operands[k]);
  }

  // What a lane must know of a request and a set: it stores scores of one slot.
  struct Row {
    uint32_t weights;     // of the lane's column in the second product, at its heads
    bool weighs[kSlots];  // whether that column is of this slot; it is zero at the heads of others
    uint32_t held_weights[kOneSet ? kHeadBlocks : 1][2];
    uint8_t* out;    // of the token in the request's first tile
    unsigned limit;  // columns below it are live,
    unsigned bound;  // below this they are written
    int power;
  };

  __device__ static uint32_t load_weights(const Row& row, int block, int half) {
    const int column = 16 * block + 8 * half, slot = column / kHeads;
    const uint32_t pair = device::load_shared_int(row.weights + slot * (kHeads * 4) + column % kHeads * 2);
    return row.weighs[slot] ? pair : 0;
  }

  template <int kOutBytes>
  __device__ void load_row(Row& row, int request, int query_stage, int set, int token) const {
    const int column_slot = lane / 8 % kPlaces;
    row.weights = slot_weights(query_stage, set * kSlots) + lane / 4 % 2 * (kHeads * 2) + lane % 4 * 4;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) row.weighs[slot] = slot == column_slot;
    if constexpr (kOneSet) {
#pragma unroll
      for (int block = 0; block < kHeadBlocks; ++block) {
        row.held_weights[block][0] = load_weights(row, block, 0);
        row.held_weights[block][1] = load_weights(row, block, 1);
      }
    }
    const int in_set = lane % 4 % kPlaces;
    const int slot = set * kSlots + min(in_set, kSlots - 1);
    const bool stores = in_set < kSlots && slot < p.next_n;
    row.limit = static_cast<unsigned>(device::load_shared_int(limits(query_stage) + slot * 4));
    row.bound = !stores ? 0 : p.clean ? static_cast<unsigned>(p.max_seq_len) : row.limit;
    row.out = static_cast<uint8_t*>(p.out) + ((request * p.next_n + slot) * p.out_stride + token) * kOutBytes;
    row.power = device::load_shared_int(powers(query_stage) + slot * 4) - kScaleBias - kKeyPower;
    // Opaque to the compiler, which would else compute them anew for every tile.
    asm volatile("" : "+l"(row.out), "+r"(row.bound));
  }

  // Scores of a slab under the heads of a set, before powers of two: of tokens g and g + 8 under the lane's slot.
  // `meanwhile` runs while the matrix unit works.
  template <typename Meanwhile>
  __device__ void score(float (&scores)[2], Slab& slab, uint32_t set_queries, const Row& row,
                        const Meanwhile& meanwhile) const {
    const device::MatrixDescriptor heads(set_queries);
    uint32_t products[kColumns / 4];  // pairs
    device::pin(products);
    device::matrix_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      device::multiply_halves<kColumns>(products, slab.operands[k], heads.at<kHeadDim>(k), k > 0);
    }
    device::matrix_commit();
    meanwhile();
    device::matrix_wait<0>();
    device::pin(products);

    constexpr int kChains = kHeadBlocks > 1 ? 2 : 1;
    float sums[kChains][4] = {};
#pragma unroll
    for (int block = 0; block < kHeadBlocks; ++block) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = device::relu_half2(products[4 * block + i]);
      const uint32_t b0 = kOneSet ? row.held_weights[block][0] : load_weights(row, block, 0);
      const uint32_t b1 = kOneSet ? row.held_weights[block][1] : load_weights(row, block, 1);
      device::mma_half(sums[block % kChains], a[0], a[1], a[2], a[3], b0, b1);
    }
    constexpr float kLo = 1.f / (1 << kLoWeightPower);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float hi = sums[0][2 * half], lo = sums[0][2 * half + 1];
      if constexpr (kChains > 1) {
        hi += sums[1][2 * half];
        lo += sums[1][2 * half + 1];
      }
      scores[half] = fmaf(lo, kLo, hi);
    }
  }

  template <int kOutBytes>
  __device__ void store(float sum, int scale, uint64_t token, unsigned column, bool is_absent, const Row& row) const {
    if (column >= row.bound) return;
    float score = -INFINITY;
    if (column < row.limit && !is_absent) {
      const int exponent = scale + row.power;
      const bool normal = static_cast<unsigned>(exponent + 126) <= 253;
      score = normal ? sum * power_of_two(exponent) : ldexpf(sum, exponent);
    }
    uint8_t* target = row.out + token * kOutBytes;
    __builtin_assume(__isGlobal(target));  // forgotten when it was made opaque
    if constexpr (kOutBytes == 4) {
      *reinterpret_cast<float*>(target) = score;
    } else {
      device::store_float(target, p.out_type, 0, score);
    }
  }

  template <int kOutBytes>
  __device__ void consume(int group) const {
    const int warp = static_cast<int>(threadIdx.x) / kWarpThreads % 4;
    const int first_row = 16 * warp + lane / 4;
    const Places places(p.cache, first_row, lane % 4);
    // Whose scores this lane stores: of one slot, only those of a slab and half of its own; of two, those of a half.
    const int share = lane % 4 / kPlaces;
    const int own_half = kPlaces == 1 ? share % 2 : share;
    const bool own_slab = kPlaces == 1 && share / 2 == 1;
    const int token = first_row + (kPlaces < 4 ? 8 * own_half : 0) + (own_slab ? kMatrixRows : 0);
    int page[2];  // the token's bit among a tile's pages, by slab
#pragma unroll
    for (int slab = 0; slab < 2; ++slab) {
      page[slab] = 1 << ((token + (kPlaces > 1 ? slab * kMatrixRows : 0)) >> min(p.cache.block_shift, kTileShift));
      asm volatile("" : "+r"(page[slab]));  // as in load_row
    }
    int reference = 0;
    int skip = group;  // tiles of the next job that come before this group's next tile
    RingPosition ring{skip, 0};
    RingPosition query_ring{0, 0};
    Row row;
#pragma unroll 1
    while (true) {
      const int query_stage = query_ring.stage;
      device::wait(query_full(query_stage), query_ring.parity);
      const int4 words = device::load_shared_int4(query_job(query_stage));
      // Of the first lane, so that the compiler knows it to be the same in all.
      const Job job{words.x, words.y, __shfl_sync(~0u, words.z, 0)};
      if (job.tiles < 0) return;
      if (kOneSet && skip < job.tiles) load_row<kOutBytes>(row, job.request, query_stage, 0, token);

      // A slab is decoded while the matrix unit works on the one before it.
      Slab slabs[2];
      const auto decode_first = [&] {
        device::wait(full(ring.stage), ring.parity);
        decode(slabs[0], places, values(ring.stage), 0, reference);
      };
      const auto decode_second = [&] {
        decode(slabs[1], places, values(ring.stage), 1, reference);
        release(empty(ring.stage));
        ring.advance(turns, plan.stages);
      };
      int i = skip;
      if (i < job.tiles) decode_first();
#pragma unroll 1
      for (; i < job.tiles; i += turns) {
        const int absent_pages = device::load_shared_int(absent(ring.stage));
        const unsigned first_column = static_cast<unsigned>(job.first_tile + i) * kTileTokens;
        float first_score;
        int first_scale;
        // Scores of slab `number`, and stores.
        const auto score_slab = [&](Slab& slab, int number, int set, const auto& meanwhile) {
          const int scales[2] = {slab.scales[0], slab.scales[1]};
          float scores[2];
          score(scores, slab, query(query_stage) + set * (kColumns * kHeadDim), row, meanwhile);
          if constexpr (kPlaces == 1) {
            const float own = own_half ? scores[1] : scores[0];
            const int scale = own_half ? scales[1] : scales[0];
            if (number == 0) {
              first_score = own;
              first_scale = scale;
            } else {
              store<kOutBytes>(own_slab ? own : first_score, own_slab ? scale : first_scale, first_column,
                               first_column + token, (absent_pages & page[0]) != 0, row);
            }
          } else {
#pragma unroll
            for (int half = 0; half < kPlaces / 2; ++half) {
              const int offset = number * kMatrixRows + 8 * half;
              const bool second = kPlaces == 2 ? own_half : half == 1;
              store<kOutBytes>(second ? scores[1] : scores[0], second ? scales[1] : scales[0], first_column + offset,
                               first_column + offset + token, (absent_pages & page[number]) != 0, row);
            }
          }
        };
        const auto score_sets = [&](Slab& slab, int number, const auto& meanwhile) {
          if constexpr (kOneSet) {
            score_slab(slab, number, 0, meanwhile);
          } else {
#pragma unroll 1
            for (int set = 0; set < sets; ++set) {
              load_row<kOutBytes>(row, job.request, query_stage, set, token);
              score_slab(slab, number, set, [&] {
                if (set == 0) meanwhile();
              });
            }
          }
        };
        const auto decode_next = [&] {
          if (i + turns < job.tiles) decode_first();
        };
        score_sets(slabs[0], 0, decode_second);
        score_sets(slabs[1], 1, decode_next);
      }
      skip = i - job.tiles;
      device::arrive(query_empty(query_stage));  // every lane for itself: it read the job, and perhaps the weights
      query_ring.advance(1, plan.query_stages);
    }
  }
};

}  // namespace mqa::paged_logits
