// What the quantisers and cache movers are given, checked by host.cpp. Strides count elements of the tensor they belong
// to. The contents behind the pointers are untrusted.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/paged_cache.h"

namespace mqa::quantize {

constexpr int kMaxLeadingDims = 8;
constexpr int kGroup = 32;  // elements of an MXFP4 row that share a scale

// Where each row of a tensor starts, rows being numbered over all dimensions but the innermost of [..., H, D], or over
// all of [..., H]. Neighbouring dimensions are merged where their strides allow: mostly one is left.
struct RowOffsets {
  int dims;
  int64_t sizes[kMaxLeadingDims + 1];
  int64_t strides[kMaxLeadingDims + 1];

  MQA_HOST_DEVICE int64_t operator()(int64_t row) const {
    if (dims == 1) return row * strides[0];
    int64_t offset = 0;
    for (int dim = dims - 1; dim >= 0; --dim) {
      offset += row % sizes[dim] * strides[dim];
      row /= sizes[dim];
    }
    return offset;
  }
};

// Rows of D elements to be quantised.
struct Rows {
  int64_t count;
  int64_t head_dim;  // D
  const void* data;
  FloatType type;
  RowOffsets offsets;
};

struct QuantizeQFp8Params {
  Rows q;               // a row for each (token, head)
  const void* weights;  // [..., H], or nullptr: 1
  FloatType weights_type;
  RowOffsets weights_offsets;

  uint8_t* q_fp8;  // e4m3 [..., H, D]
  RowOffsets q_fp8_offsets;
  float* weights_f32;  // [..., H]
  RowOffsets weights_f32_offsets;

  bool pow2_scale;
  float softmax_scale;
};

struct QuantizeQMxfp4Params {
  Rows q;
  uint8_t* q_fp4;  // [..., H, D / 2]
  RowOffsets q_fp4_offsets;
  uint32_t* q_sf;  // [..., H]
  RowOffsets q_sf_offsets;
};

struct QuantizeKParams {
  Rows k;                // a row for each token
  const int64_t* slots;  // [tokens]: s is token s % S of block s / S; negative or past the pool: skipped
  PagedCache cache;
  uint8_t* written;  // cache.data, for writing
  bool pow2_scale;   // FP8's scales
  uint32_t nonce;    // of this call's claims on CUDA
};

struct GatherKParams {
  int64_t batch;         // B
  int64_t total_tokens;  // rows of the result
  PagedCache cache;
  const int32_t* block_tables;  // [B, W]
  int64_t table_stride;
  int64_t table_width;
  const int32_t* cu_seq_lens;  // [B + 1]

  uint8_t* k;  // [total_tokens, value bytes]
  int64_t k_stride;
  uint32_t* k_scale;  // [total_tokens]: a float32, or four scale bytes
};

// Of a D 64 row's four scale bytes the last two scale nothing. They say 1.
constexpr uint32_t kNoScales = 0x7f7f0000;

// Writing a token whose slot another token shares: the one that wins must stand in the cache whole. A token claims its
// slot by putting this tag in place of the first eight bytes of its values. The last of them is one that the quantiser
// of its format never writes (e4m3 0xFF, the other NaN; e2m1 8, minus zero), so values are never mistaken for a tag.
// Nor is what a pool held before, where that matters: `nonce` differs from call to call.
MQA_HOST_DEVICE inline uint64_t claim_tag(CacheFormat format, int64_t token, uint32_t nonce) {
  const uint64_t mark = format == CacheFormat::kFp8 ? 0xff : 0x88;
  return mark << 56 | static_cast<uint64_t>(nonce & 0xffffff) << 32 | static_cast<uint32_t>(token);
}

MQA_HOST_DEVICE inline bool slot_exists(const PagedCache& cache, int64_t slot) {
  return slot >= 0 && slot >> cache.block_shift < cache.num_blocks;
}

// Byte offsets of a slot's values and scales from the start of the pool.
MQA_HOST_DEVICE inline int64_t slot_values(const PagedCache& cache, int64_t slot) {
  return (slot >> cache.block_shift) * cache.block_stride + (slot & (cache.block_size - 1)) * cache.value_bytes;
}
MQA_HOST_DEVICE inline int64_t slot_scales(const PagedCache& cache, int64_t slot) {
  return (slot >> cache.block_shift) * cache.block_stride + cache.block_size * cache.value_bytes +
         cache.scale_place(slot & (cache.block_size - 1)) * cache.scale_bytes;
}

}  // namespace mqa::quantize
