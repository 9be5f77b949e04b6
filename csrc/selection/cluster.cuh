// Selection from sm_90 on: the blocks of a cluster share a row, which stays in their registers where it fits.
//
// Three steps, with a barrier of the cluster between them. The largest of every few elements go into a histogram, which
// gives a bound that at least k of these reach, and so at least k elements, but not many more. Elements that reach it,
// the candidates, go to all blocks. Each finds the k-th largest among them, and writes those of its own part that are
// chosen. Where too many elements reach the bound, a radix search over all of the row's takes the candidates' place.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/cluster.cuh"
#include "device/mbarrier.cuh"
#include "device/warp.cuh"
#include "selection/params.h"

namespace mqa::selection {

using device::kWarpThreads;
constexpr int kMostBlocks = 16;  // of a cluster

// kOneTile: every block's part of a row fits into its registers.
template <FloatType kType, bool kOneTile>
struct ClusterTopk {
  static constexpr int kThreads = 512, kWarps = kThreads / kWarpThreads;
  using Element = std::conditional_t<kType == FloatType::kFloat32, uint32_t, uint16_t>;
  static constexpr int kVector = 16 / sizeof(Element);  // elements that are loaded together
  static constexpr int kItems = 32;                     // a thread's, of a tile
  static constexpr int kVectors = kItems / kVector;
  static constexpr int kTile = kThreads * kItems;
  static constexpr int kGroup = 8;         // elements of which the largest is counted
  static constexpr int kSparse = 10;       // times k elements or more make groups worth while
  static constexpr int kCapacity = 8192;   // candidates
  static constexpr uint32_t kOutside = 0;  // no element's key
  static constexpr int kCoarse = 64, kFine = kBins / kCoarse;
  static_assert(kFine == kWarpThreads && kCoarse * 8 == kThreads && kFine * kMostBlocks == kThreads);

  struct Shared {
    int counts[kBins];
    int coarse[kCoarse];  // sums of kFine counts
    int totals[kCoarse];  // counts of the whole cluster
    int sums[2][kWarps];
    int taken;  // of block 0: places among the candidates
    int base;   // the first of them that is this block's
    uint32_t largest;
    // Of each block's part.
    int gathered[kMostBlocks], above[kMostBlocks], ties[kMostBlocks], kept[kMostBlocks];
    uint32_t chosen[kTile / 32], tied[kTile / 32];  // a bit per element of a tile
    uint2 candidates[kCapacity];                    // key and position
  };

  // What is chosen: keys above `key`, and the first `ties` of those equal to it.
  struct Threshold {
    uint32_t key;
    int ties;
  };

  const TopkParams& p;
  Shared& shared;
  int thread, lane, warp;
  int rank, blocks;
  const Element* aligned;  // the row's start, moved back to a multiple of 16 bytes
  unsigned start, end;     // of the row, from `aligned` on
  unsigned first, last;    // of this block's part
  const int32_t* table;    // of the row
  int32_t* out;
  uint32_t keys[kItems];

  __device__ __forceinline__ ClusterTopk(const TopkParams& params, Shared& memory)
      : p(params),
        shared(memory),
        thread(static_cast<int>(threadIdx.x)),
        lane(thread % kWarpThreads),
        warp(thread / kWarpThreads),
        rank(device::cluster_rank()),
        blocks(device::cluster_size()) {}

  // -------------------------------------------------------------------------------------------------------------------
  // the row
  // -------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ static uint32_t key_of(uint32_t bits) {
    if constexpr (kType == FloatType::kFloat32) return order_key(bits);
    const auto half = static_cast<uint16_t>(bits);
    return order_key(kType == FloatType::kBFloat16 ? order_bits_of_bfloat16(half) : order_bits_of_float16(half));
  }

  __device__ __forceinline__ unsigned place(unsigned tile, int item) const {
    return tile + (item / kVector * kThreads + thread) * kVector + item % kVector;
  }

  __device__ __forceinline__ bool inside(unsigned at) const { return at >= start && at < last; }
  __device__ __forceinline__ bool all_inside(unsigned at) const { return at >= start && at + kVector <= last; }

  __device__ __forceinline__ void load(unsigned tile) {
    // All loads are on their way before the first is used.
    uint4 words[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const unsigned at = place(tile, v * kVector);
      if (all_inside(at)) words[v] = *reinterpret_cast<const uint4*>(aligned + at);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const unsigned at = place(tile, v * kVector);
      const uint32_t all[4] = {words[v].x, words[v].y, words[v].z, words[v].w};
      if (all_inside(at)) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          keys[v * kVector + i] = key_of(kVector == 4 ? all[i % 4] : all[i / 2 % 4] >> (i % 2 * 16));
        }
      } else {  // the row's ends, and what is past them
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          keys[v * kVector + i] = kOutside;
          if (inside(at + i)) keys[v * kVector + i] = key_of(aligned[at + i]);
        }
      }
    }
  }

  // Else the compiler keeps what it made of the keys beside them, and there are not registers enough.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int i = 0; i < kItems; ++i) asm volatile("" : "+r"(keys[i]));
  }

  // visit(tile) for each of the part's, with its keys. They stay from one call to the next if they are of one tile.
  template <typename Visit>
  __device__ __forceinline__ void for_tiles(bool loaded, const Visit& visit) {
    if constexpr (kOneTile) {
      if (!loaded) load(first);
      forget();
      visit(first);
      forget();
    } else {
      for (unsigned tile = first; tile < last; tile += kTile) {
        load(tile);
        visit(tile);
      }
    }
  }

  // -------------------------------------------------------------------------------------------------------------------
  // sums
  // -------------------------------------------------------------------------------------------------------------------

  // Sums of the threads in front of this one. `slot` as in the portable kernel.
  __device__ __forceinline__ int sum_before(int value, int slot, int& total) const {
    const int inclusive = device::sum_up_to(value, lane);
    if (lane == kWarpThreads - 1) shared.sums[slot][warp] = inclusive;
    __syncthreads();
    const int sum = lane < kWarps ? shared.sums[slot][lane] : 0;
    total = __reduce_add_sync(~0u, sum);
    return __reduce_add_sync(~0u, lane < warp ? sum : 0) + inclusive - value;
  }

  // Of 32 or 64 counts that start at `counts`, kPer to a lane from the top: the one with the wanted-th from the top.
  template <int kPer>
  __device__ __forceinline__ int find(const int* counts, int& wanted) const {
    int own[kPer], sum = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum += own[i] = counts[kPer * kWarpThreads - 1 - (lane * kPer + i)];
    const int inclusive = device::sum_up_to(sum, lane);
    const unsigned reached = __ballot_sync(~0u, inclusive >= wanted);
    const int owner = __ffs(reached) - 1;
    int before = inclusive - sum, bin = kPer * kWarpThreads - 1 - lane * kPer;
#pragma unroll
    for (int i = 0; i + 1 < kPer; ++i) {
      if (before + own[i] < wanted) {
        before += own[i];
        --bin;
      } else {
        break;
      }
    }
    wanted -= __shfl_sync(~0u, before, owner);
    return __shfl_sync(~0u, bin, owner);
  }

  // The bin of the wanted-th from the top of what all blocks have counted, or this one alone; `wanted` becomes the
  // how many-th of the bin it is. The counts must be complete, and a barrier come before they change.
  __device__ __forceinline__ int find_bin(int& wanted, bool all_blocks) const {
    const int group = thread / 8;
    int sum = 0;
    if (all_blocks) {
      for (int other = thread % 8; other < blocks; other += 8) sum += device::shared_of(shared.coarse, other)[group];
    } else {
      sum = thread % 8 == 0 ? shared.coarse[group] : 0;
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (thread % 8 == 0) shared.totals[group] = sum;
    __syncthreads();
    const int coarse = find<kCoarse / kWarpThreads>(shared.totals, wanted);
    __syncthreads();  // the totals have been read
    const int bin = thread / kMostBlocks, other = thread % kMostBlocks;
    sum = 0;
    if (all_blocks) {
      if (other < blocks) sum = device::shared_of(shared.counts, other)[coarse * kFine + bin];
    } else if (other == 0) {
      sum = shared.counts[coarse * kFine + bin];
    }
#pragma unroll
    for (int step = 1; step < kMostBlocks; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (other == 0) shared.totals[bin] = sum;
    __syncthreads();
    return coarse * kFine + find<1>(shared.totals, wanted);
  }

  __device__ __forceinline__ void clear_counts() const {
#pragma unroll
    for (int i = 0; i < kBins / kThreads; ++i) shared.counts[thread + i * kThreads] = 0;
    __syncthreads();
  }

  __device__ __forceinline__ void count(uint32_t bin) const { atomicAdd(&shared.counts[bin], 1); }

  // After the counts are complete.
  __device__ __forceinline__ void sum_coarse() const {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCoarse / kWarps; ++i) {
      const int group = warp * (kCoarse / kWarps) + i;
      const int sum = __reduce_add_sync(~0u, shared.counts[group * kFine + lane]);
      if (lane == 0) shared.coarse[group] = sum;
    }
  }

  // -------------------------------------------------------------------------------------------------------------------
  // the search
  // -------------------------------------------------------------------------------------------------------------------

  // A key that no less than k elements reach.
  __device__ __forceinline__ uint32_t bound(bool groups) {
    clear_counts();
    for_tiles(false, [&](unsigned) {
      if (groups) {
#pragma unroll
        for (int i = 0; i < kItems; i += kGroup) {
          uint32_t largest = kOutside;
#pragma unroll
          for (int j = 0; j < kGroup; ++j) largest = max(largest, keys[i + j]);
          if (largest != kOutside) count(largest >> digit(0).shift);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (keys[i] != kOutside) count(keys[i] >> digit(0).shift);
        }
      }
    });
    sum_coarse();
    device::cluster_sync();
    int wanted = static_cast<int>(p.k);
    return max(static_cast<uint32_t>(find_bin(wanted, true)) << digit(0).shift, kNanKey);
  }

  // Elements that reach the bound go to all blocks. Returns how many there are; they are not there if they are more
  // than there is room for.
  __device__ __forceinline__ int gather(uint32_t lowest) {
    int own = 0;
    for_tiles(true, [&](unsigned) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) own += keys[i] >= lowest;
    });
    int total;
    const int before = sum_before(own, 0, total);
    if (thread == 0) shared.base = atomicAdd(device::shared_of(&shared.taken, 0), total);
    if (thread < blocks) device::shared_of(shared.gathered, thread)[rank] = total;
    __syncthreads();
    if (shared.base + total <= kCapacity) {
      int at = shared.base + before;
      for_tiles(true, [&](unsigned tile) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (keys[i] < lowest || at >= kCapacity) continue;  // of a row that changes meanwhile there may be more
          const uint2 candidate{keys[i], place(tile, i) - start};
          for (int other = 0; other < blocks; ++other) device::shared_of(shared.candidates, other)[at] = candidate;
          ++at;
        }
      });
    }
    device::cluster_sync();
    return __reduce_add_sync(~0u, lane < blocks ? shared.gathered[lane % kMostBlocks] : 0);
  }

  // The k-th largest of the candidates, all of which reach `lowest`.
  __device__ __forceinline__ Threshold search_candidates(uint32_t lowest, int candidates) const {
    uint32_t largest = 0;
    for (int i = thread; i < candidates; i += kThreads) largest = max(largest, shared.candidates[i].x);
    largest = __reduce_max_sync(~0u, largest);
    if (lane == 0) atomicMax(&shared.largest, largest);
    __syncthreads();
    // Among keys from `lowest` to `lowest + range`. In three rounds at most, whatever the counts.
    uint32_t range = shared.largest - lowest;
    int shift = 32 - __clz(static_cast<int>(range));
    int wanted = static_cast<int>(p.k);
    while (true) {
      shift = max(shift - digit(0).bits, 0);
      clear_counts();
      for (int i = thread; i < candidates; i += kThreads) {
        const uint32_t offset = shared.candidates[i].x - lowest;
        if (offset <= range) count(offset >> shift);
      }
      sum_coarse();
      __syncthreads();
      const int bin = find_bin(wanted, false);
      lowest += static_cast<uint32_t>(bin) << shift;
      range = (1u << shift) - 1;
      if (shift == 0) return {lowest, wanted};
      if (shared.counts[bin] == wanted) return {lowest - 1, 0};
      __syncthreads();  // the counts have been read
    }
  }

  // The k-th largest of all elements, by the digits of their keys.
  __device__ __forceinline__ Threshold search_all() {
    uint32_t mask = 0, value = 0;
    int wanted = static_cast<int>(p.k);
#pragma unroll 1
    for (int i = 0; i < kDigits; ++i) {
      const Digit now = digit(i);
      const uint32_t bin_mask = (1u << now.bits) - 1;
      device::cluster_sync();  // others have read the counts
      clear_counts();
      for_tiles(true, [&](unsigned) {
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
          if (keys[j] != kOutside && (keys[j] & mask) == value) count(keys[j] >> now.shift & bin_mask);
        }
      });
      sum_coarse();
      device::cluster_sync();
      value |= static_cast<uint32_t>(find_bin(wanted, true)) << now.shift;
      mask |= bin_mask << now.shift;
    }
    return {value, wanted};
  }

  // -------------------------------------------------------------------------------------------------------------------
  // the result
  // -------------------------------------------------------------------------------------------------------------------

  // Of the candidates in parts in front of this block's: how many are above the threshold, and equal to it.
  __device__ __forceinline__ void count_candidates(Threshold threshold, int candidates, int& above, int& ties) const {
    int own_above = 0, own_ties = 0;
    const int begin = static_cast<int>(first) - static_cast<int>(start);
    for (int i = thread; i < candidates; i += kThreads) {
      const uint2 candidate = shared.candidates[i];
      const bool before = static_cast<int>(candidate.y) < begin;
      own_above += before && candidate.x > threshold.key;
      own_ties += before && candidate.x == threshold.key;
    }
    sum_before(own_above, 0, above);
    sum_before(own_ties, 1, ties);
    __syncthreads();
  }

  // The same for all elements.
  __device__ __forceinline__ void count_all(Threshold threshold, int& above, int& ties) {
    int own_above = 0, own_ties = 0;
    for_tiles(true, [&](unsigned) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        own_above += keys[i] > threshold.key;
        own_ties += keys[i] == threshold.key;
      }
    });
    int total_above, total_ties;
    sum_before(own_above, 0, total_above);
    sum_before(own_ties, 1, total_ties);
    if (thread < blocks) {
      device::shared_of(shared.above, thread)[rank] = total_above;
      device::shared_of(shared.ties, thread)[rank] = total_ties;
    }
    device::cluster_sync();
    above = __reduce_add_sync(~0u, lane < rank ? shared.above[lane % kMostBlocks] : 0);
    ties = __reduce_add_sync(~0u, lane < rank ? shared.ties[lane % kMostBlocks] : 0);
  }

  // The elements of a tile that are chosen and not dropped, a bit each: 32 to a thread. `ties` is how many there are in
  // front of the tile, and then in front of the next.
  __device__ __forceinline__ uint32_t chosen_bits(unsigned tile, Threshold threshold, int& ties) const {
    static_assert(kTile / 32 <= kThreads);
    shared.chosen[thread] = shared.tied[thread] = 0;
    __syncthreads();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      uint32_t chosen = 0, tied = 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        chosen |= static_cast<uint32_t>(keys[v * kVector + i] > threshold.key) << i;
        tied |= static_cast<uint32_t>(keys[v * kVector + i] == threshold.key) << i;
      }
      const int at = (v * kThreads + thread) * kVector;
      if (chosen != 0) atomicOr(&shared.chosen[at / 32], chosen << at % 32);
      if (tied != 0) atomicOr(&shared.tied[at / 32], tied << at % 32);
    }
    __syncthreads();
    uint32_t chosen = shared.chosen[thread], tied = shared.tied[thread];
    int total;
    int free = threshold.ties - ties - sum_before(__popc(tied), 1, total);
    for (; tied != 0 && free > 0; --free, tied &= tied - 1) chosen |= tied & (0u - tied);
    ties += total;
    if (p.block_size != 0) {
      for (uint32_t rest = chosen; rest != 0; rest &= rest - 1) {
        if (p.result(table, position(tile, rest)) < 0) chosen ^= rest & (0u - rest);
      }
    }
    return chosen;
  }

  // Of the thread's lowest bit.
  __device__ __forceinline__ uint32_t position(unsigned tile, uint32_t bits) const {
    return tile + thread * 32 + (__ffs(static_cast<int>(bits)) - 1) - start;
  }

  // `above` and `ties`: elements in front of this block's part.
  __device__ __forceinline__ void store(Threshold threshold, int above, int ties) {
    int written = above + min(ties, threshold.ties);
    if (p.block_size != 0) {
      int own = 0, total, before = ties;
      for_tiles(true, [&](unsigned tile) { own += __popc(chosen_bits(tile, threshold, before)); });
      sum_before(own, 0, total);
      if (thread < blocks) device::shared_of(shared.kept, thread)[rank] = total;
      device::cluster_sync();
      const int kept = lane < blocks ? shared.kept[lane % kMostBlocks] : 0;
      written = __reduce_add_sync(~0u, lane < rank ? kept : 0);
      if (rank == blocks - 1) fill(__reduce_add_sync(~0u, kept));
    }
    for_tiles(true, [&](unsigned tile) {
      uint32_t bits = chosen_bits(tile, threshold, ties);
      int total;
      int at = written + sum_before(__popc(bits), 0, total);
      for (; bits != 0 && at < p.k; bits &= bits - 1) out[at++] = p.result(table, position(tile, bits));
      written += total;
    });
  }

  __device__ __forceinline__ void fill(int from) const {
    for (int i = from + thread; i < p.k; i += kThreads) out[i] = -1;
  }

  // All of a row that has no more than k.
  __device__ __forceinline__ void store_all(int length) const {
    int written = 0;
    for (int begin = 0; begin < length; begin += kThreads) {
      const int position = begin + thread;
      const int32_t result = position < length ? p.result(table, static_cast<uint32_t>(position)) : -1;
      int total;
      const int at = written + sum_before(result >= 0, 0, total);
      if (result >= 0) out[at] = result;
      written += total;
      __syncthreads();  // the sums have been read
    }
    fill(written);
  }

  __device__ __forceinline__ void select() {
    const int64_t row = static_cast<int>(blockIdx.x) / blocks;
    const Span span = p.span(row);
    table = p.table(row);
    out = p.out + row * p.out_stride;
    if (span.length <= p.k) {
      if (rank == 0) store_all(static_cast<int>(span.length));
      return;
    }
    const auto address =
        reinterpret_cast<uintptr_t>(static_cast<const Element*>(p.logits) + row * p.row_stride + span.start);
    aligned = reinterpret_cast<const Element*>(address / 16 * 16);
    start = static_cast<unsigned>(address % 16 / sizeof(Element));
    end = start + static_cast<unsigned>(span.length);
    constexpr unsigned kStep = 128;
    const unsigned part = (end + blocks * kStep - 1) / (blocks * kStep) * kStep;
    first = rank * part;
    last = max(min(first + part, end), first);
    if (thread == 0) {
      shared.taken = 0;
      shared.largest = 0;
    }

    const uint32_t lowest = bound(span.length >= kSparse * p.k);
    const int candidates = gather(lowest);
    int above, ties;
    Threshold threshold;
    if (candidates <= kCapacity) {
      threshold = search_candidates(lowest, candidates);
      count_candidates(threshold, candidates, above, ties);
    } else {
      threshold = search_all();
      count_all(threshold, above, ties);
    }
    store(threshold, above, ties);
  }
};

template <FloatType kType, bool kOneTile>
__global__ void __launch_bounds__(ClusterTopk<kType, kOneTile>::kThreads, 2)
    cluster_topk_kernel(const __grid_constant__ TopkParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) uint8_t memory[];
  ClusterTopk<kType, kOneTile> topk(p, *reinterpret_cast<typename ClusterTopk<kType, kOneTile>::Shared*>(memory));
  device::allow_next_kernel();
  device::wait_for_previous_kernel();
  topk.select();
#else
  __trap();  // launch_cluster() in cuda.cu lets no older code through
#endif
}

}  // namespace mqa::selection
