// MXFP4 rows as e4m3 operands of the matrix unit: a group's scale over a power of two that the whole row is taken
// relative to goes into e4m3's exponent, so that the unit runs at its FP8 rate.
//
// Its sums are halves here. So that none overflows, magnitudes go up to 6 * 2^2 in K and 6 * 2^1 in q: 128 products are
// less than 2^16. Groups of K down to 2^-10 of a row's largest scale are exact, of q down to 2^-9; the elements of
// smaller ones are rounded to multiples of 2^-11, of q of 2^-10, of it.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"
#include "device/float_types.cuh"
#include "device/mbarrier.cuh"
#include "paged_logits/params.h"

namespace mqa::paged_logits {

constexpr int kScaleBias = 127, kNanScale = 255;
// The power of two by which a row's largest scale is multiplied.
constexpr int kKeyPower = 2, kQueryPower = 1;
// How far below the largest scale another may be for e4m3 codes of elements that are not subnormal: 2^-6 at the least.
constexpr int kKeyWindow = kKeyPower + 5;
constexpr int kQueryExact = kQueryPower + 8;  // how far below it none is rounded
constexpr int kZeroRow = -1;                  // in place of a row's scale

// The codes of e4m3 for the magnitudes of e2m1, times a power of two.
struct MagnitudeTable {
  uint32_t low, high;  // of 0, 0.5, 1, 1.5 and 2, 3, 4, 6

  // Eight elements: x has the codes of the first four, y of the others.
  __device__ __forceinline__ void expand(uint32_t word, uint32_t& x, uint32_t& y) const {
    const uint32_t magnitudes = word & 0x77777777u;
    const uint32_t even_signs = word << 4;
    uint32_t signs_x, signs_y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(low), "r"(high), "r"(magnitudes));
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(magnitudes >> 16));
    asm("prmt.b32 %0, %1, %2, 0x5140;" : "=r"(signs_x) : "r"(even_signs), "r"(word));
    asm("prmt.b32 %0, %1, %2, 0x7362;" : "=r"(signs_y) : "r"(even_signs), "r"(word));
    x |= signs_x & 0x80808080u;
    y |= signs_y & 0x80808080u;
  }
};

// The table for 2^power, which leaves none of the magnitudes subnormal.
__device__ __forceinline__ MagnitudeTable normal_table(int power) {
  return {0x3c383000u + static_cast<uint32_t>(power) * 0x08080800u,
          0x4c484440u + static_cast<uint32_t>(power) * 0x08080808u};
}

// The table for any power up to 6.
__device__ __forceinline__ MagnitudeTable any_table(int power) {
  const float factor = __int_as_float((max(power, -40) + 127) << 23);
  return {device::e4m3x2_from_floats(0.f, 0.5f * factor) | device::e4m3x2_from_floats(factor, 1.5f * factor) << 16,
          device::e4m3x2_from_floats(2.f * factor, 3.f * factor) |
              device::e4m3x2_from_floats(4.f * factor, 6.f * factor) << 16};
}

// The table of a row of K whose scales are far apart, or NaN.
__device__ __forceinline__ MagnitudeTable key_table(int code, int row_scale) {
  // Of a row or a group that is zero only the codes of 0 will be used.
  const MagnitudeTable table = any_table(min(kKeyPower + code - row_scale, kKeyPower));
  return row_scale == kNanScale ? MagnitudeTable{0x7f7f7f7fu, 0x7f7f7f7fu} : table;
}

// What a row is taken relative to: the largest scale code of its groups that are not zero, kNanScale, or kZeroRow.
// `any` are the bits of a group's elements, or-ed.
__device__ __forceinline__ int group_scale(uint32_t any, int code) {
  return code == kNanScale ? kNanScale : (any & 0x77777777u) != 0 ? code : kZeroRow;
}

// A lane's part of a row of D elements, a quarter.
template <int kHeadDim>
struct Mxfp4Part {
  static constexpr int kWords = kHeadDim / 32;
  static constexpr int kBytes = kWords * 4;
  static constexpr int kGroups = kHeadDim / 32;

  uint32_t words[kWords];
  uint32_t row_scales;  // of all groups

  // From shared memory.
  __device__ __forceinline__ void load(uint32_t part) {
    if constexpr (kWords == 4) {
      const int4 vector = device::load_shared_int4(part);
      words[0] = vector.x, words[1] = vector.y, words[2] = vector.z, words[3] = vector.w;
    } else {
      const int2 pair = device::load_shared_int2(part);
      words[0] = pair.x, words[1] = pair.y;
    }
  }

  // From global to shared memory, complete when this thread's copies are.
  __device__ static __forceinline__ void copy(uint32_t part, const uint8_t* source, bool aligned) {
    if (aligned) {
      device::copy_async<kBytes>(part, source);
    } else {
#pragma unroll 1
      for (int i = 0; i < kBytes; ++i) device::store_shared_byte(part + i, source[i]);
    }
  }

  __device__ static __forceinline__ int code(uint32_t scales, int group) { return scales >> (8 * group) & 255; }

  // What a row of q is taken relative to: the largest of its scale codes, if for all that these say no group is
  // rounded; else kZeroRow, and group_scale decides.
  __device__ static __forceinline__ int near_scale(uint32_t scales) {
    int top = code(scales, 0), bottom = top;
#pragma unroll
    for (int group = 1; group < kGroups; ++group) {
      top = max(top, code(scales, group));
      bottom = min(bottom, code(scales, group));
    }
    return top == kNanScale || top - bottom > kQueryExact ? kZeroRow : top;
  }

  __device__ __forceinline__ uint32_t any() const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) bits |= words[i];
    return bits;
  }

  // The table of a row of q; one that is NaN is 0, and its weight NaN. All lanes of the warp call.
  __device__ __forceinline__ MagnitudeTable query_table(int quarter) const {
    const int own = code(row_scales, quarter * kGroups / 4);
    int scale = near_scale(row_scales);
    if (__any_sync(~0u, scale == kZeroRow)) {
      const int far_scale = row_scale(any(), own);
      if (scale == kZeroRow) scale = far_scale;
    }
    const MagnitudeTable table = any_table(min(kQueryPower + own - scale, kQueryPower));
    return scale == kNanScale ? MagnitudeTable{0, 0} : table;
  }

  // Of the row that the four lanes of a quad have, as group_scale. All lanes of the warp call.
  __device__ static __forceinline__ int row_scale(uint32_t any, int code) {
    int largest = group_scale(any, code);
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    return max(largest, __shfl_xor_sync(~0u, largest, 2));
  }
};

// 2^exponent for -126 to 127.
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// The weights of a slot: a lane's are those of every 32nd head.
template <int kHeads>
struct Mxfp4Weights {
  static constexpr int kLaneHeads = (kHeads + 31) / 32;

  float weight[kLaneHeads];
  uint32_t row_scales[kLaneHeads];  // of the heads' rows of q

  __device__ __forceinline__ void load(const LogitsParams& p, int request, int slot, int lane) {
    const uint32_t* scales = p.q_scales + request * p.q_scales_batch_stride + slot * p.q_scales_slot_stride;
    const int64_t row = int64_t{request} * p.next_n + slot;
#pragma unroll
    for (int i = 0; i < kLaneHeads; ++i) {
      const int head = min(lane + i * 32, kHeads - 1);
      weight[i] = device::load_float(p.weights, p.weights_type, row * p.weights_stride + head);
      row_scales[i] = scales[head];
    }
  }

  // Takes into the weights the powers of two of their rows, relative to a power that is no less than any of them, which
  // it returns: they end below 1. Weights that are not finite stay; those of rows that are zero become 0 if they are
  // finite; those of rows that are NaN become NaN. `q` are the slot's rows.
  template <int kHeadDim>
  __device__ __forceinline__ int normalise(const uint8_t* q, int lane) {
    using Part = Mxfp4Part<kHeadDim>;
    int power[kLaneHeads];  // of the row
    int largest = INT32_MIN;
#pragma unroll
    for (int i = 0; i < kLaneHeads; ++i) {
      int scale = Part::near_scale(row_scales[i]);
      if (scale == kZeroRow) {
        const uint8_t* row = q + min(lane + i * 32, kHeads - 1) * (kHeadDim / 2);
#pragma unroll 1
        for (int group = 0; group < Part::kGroups; ++group) {
          constexpr int kGroupBytes = 16;
          const auto bits = device::load_any<uint4>(row + group * kGroupBytes);
          const uint32_t any = bits.x | bits.y | bits.z | bits.w;
          scale = max(scale, group_scale(any, Part::code(row_scales[i], group)));
        }
      }
      if (scale == kNanScale) weight[i] = __int_as_float(0x7fffffff);
      power[i] = scale - kScaleBias - kQueryPower;
      const int biased = __float_as_int(weight[i]) >> 23 & 255;
      if (biased == 255) continue;
      if (scale == kZeroRow) weight[i] = 0.f;
      if (weight[i] != 0.f) largest = max(largest, max(biased, 1) - 126 + power[i]);
    }
    largest = __reduce_max_sync(~0u, largest);
    if (largest == INT32_MIN) return 0;
#pragma unroll
    for (int i = 0; i < kLaneHeads; ++i) {
      // In two steps, neither of which leaves the normal numbers.
      const int shift = min(max(power[i] - largest, -252), 252);
      const bool finite = (__float_as_int(weight[i]) >> 23 & 255) != 255;
      if (finite) weight[i] = weight[i] * power_of_two(shift / 2) * power_of_two(shift - shift / 2);
    }
    return largest;
  }
};

}  // namespace mqa::paged_logits
