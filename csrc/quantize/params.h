// What the quantisers and cache writers are given, checked by host.cpp. Strides count elements of the tensor they
// belong to. The contents behind the pointers are untrusted.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/paged_cache.h"

#ifdef __CUDACC__
#define MQA_HOST_DEVICE __host__ __device__
#else
#define MQA_HOST_DEVICE
#endif

namespace mqa::quantize {

constexpr int kMaxLeadingDims = 8;

// Where each token of a tensor [..., H, D] or [..., H] starts, tokens being numbered over the leading dimensions.
struct TokenOffsets {
  int dims;
  int64_t sizes[kMaxLeadingDims];
  int64_t strides[kMaxLeadingDims];

  MQA_HOST_DEVICE int64_t operator()(int64_t token) const {
    if (dims == 1) return token * strides[0];
    int64_t offset = 0;
    for (int dim = dims - 1; dim >= 0; --dim) {
      offset += token % sizes[dim] * strides[dim];
      token /= sizes[dim];
    }
    return offset;
  }
};

struct QuantizeQParams {
  int64_t tokens;
  int64_t heads;     // H
  int64_t head_dim;  // D

  const void* q;  // [tokens, H, D], [H, D] without gaps
  FloatType q_type;
  TokenOffsets q_offsets;
  const void* weights;  // [tokens, H], or nullptr: 1
  FloatType weights_type;
  TokenOffsets weights_offsets;

  uint8_t* q_fp8;  // e4m3 [tokens, H, D], [H, D] without gaps
  TokenOffsets q_fp8_offsets;
  float* weights_f32;  // [tokens, H]
  TokenOffsets weights_f32_offsets;

  bool pow2_scale;
  float softmax_scale;
};

struct QuantizeKParams {
  int64_t tokens;
  int64_t head_dim;  // D

  const void* k;  // [tokens, D]
  FloatType k_type;
  int64_t k_stride;
  const int64_t* slots;  // [tokens]: s is token s % S of block s / S; negative or past the pool: skipped

  PagedCache cache;
  uint8_t* written;  // cache.data, for writing
  bool pow2_scale;
};

struct GatherKParams {
  int64_t batch;         // B
  int64_t total_tokens;  // rows of the result
  int64_t head_dim;      // D
  PagedCache cache;
  const int32_t* block_tables;  // [B, W]
  int64_t table_stride;
  int64_t table_width;
  const int32_t* cu_seq_lens;  // [B + 1]

  uint8_t* k;  // e4m3 [total_tokens, D]
  int64_t k_stride;
  float* k_scale;  // [total_tokens]
};

// Writing a token whose slot another token shares: the one that wins must stand in the cache whole. Before any values
// are written, every token puts its tag into the scale of its slot, and afterwards only the token that finds its own
// tag writes. A tag has the sign bit, which no scale has, so the winner's scale is never mistaken for another's tag.
MQA_HOST_DEVICE inline uint32_t claim_tag(int64_t token) { return 0x80000000u | static_cast<uint32_t>(token); }

MQA_HOST_DEVICE inline bool slot_exists(const PagedCache& cache, int64_t slot) {
  return slot >= 0 && slot >> cache.block_shift < cache.num_blocks;
}

// Byte offsets of a slot's scale and values from the start of the pool.
MQA_HOST_DEVICE inline int64_t slot_values(const PagedCache& cache, int64_t head_dim, int64_t slot) {
  return (slot >> cache.block_shift) * cache.block_stride + (slot & (cache.block_size - 1)) * head_dim;
}
MQA_HOST_DEVICE inline int64_t slot_scale(const PagedCache& cache, int64_t head_dim, int64_t slot) {
  return (slot >> cache.block_shift) * cache.block_stride + cache.block_size * head_dim +
         (slot & (cache.block_size - 1)) * static_cast<int64_t>(sizeof(float));
}

}  // namespace mqa::quantize
