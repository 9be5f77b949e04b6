// What a paged-logits kernel is given: sizes, strides and pointers, checked by host.cpp. Strides count elements of the
// tensor they belong to. The contents behind the pointers are untrusted.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/paged_cache.h"

namespace mqa::paged_logits {

// Tokens per unit of the schedule; also the granularity of padded_seq_len.
constexpr int kUnitTokens = 256;

struct Lengths {
  const int32_t* data;  // [B] or [B, n]
  int64_t batch;
  int64_t slots;  // n for [B, n], 1 for [B]
  int64_t batch_stride;
  int64_t slot_stride;
};

struct LogitsParams {
  CacheFormat format;   // of q too
  int64_t batch;        // B
  int64_t next_n;       // n
  int64_t heads;        // H
  int64_t head_dim;     // D
  int64_t table_width;  // W
  int64_t max_seq_len;  // columns of the result
  int64_t capacity;     // min(max_seq_len, W * S): no position at or past it exists

  const uint8_t* q;  // e4m3 [B, n, H, D], or e2m1 pairs [B, n, H, D / 2]; the last two dimensions without gaps
  int64_t q_batch_stride;
  int64_t q_slot_stride;
  const uint32_t* q_scales;  // MXFP4: [B, n, H], byte g of a word for elements 32 g to 32 g + 31
  int64_t q_scales_batch_stride;
  int64_t q_scales_slot_stride;

  PagedCache cache;  // K

  const void* weights;  // [B*n, H]
  FloatType weights_type;
  int64_t weights_stride;

  const int32_t* block_tables;  // [B, W]
  int64_t table_stride;

  Lengths lengths;
  bool lengths_per_slot;  // seq_lens was [B, n]

  const int32_t* schedule;  // [workers + 1, 2], or nullptr: split the work in the kernel
  int64_t workers;

  void* out;  // [B*n, >= max_seq_len]
  FloatType out_type;
  int64_t out_stride;
  bool clean;  // write -inf to every column that is not live
};

struct ScheduleParams {
  Lengths lengths;
  int64_t workers;
  int32_t* out;  // [workers + 1, 2]
};

// A place in the walk over all requests and their units; (B, 0) is the end. Lengths are int32, so a request has at most
// kMaxUnits units.
constexpr int kMaxUnits = (int64_t{1} << 31) / kUnitTokens;
struct Position {
  int request;
  int unit;
};

// How a schedule cuts `total` units into `workers` runs: the first total % workers get one unit more.
struct Split {
  int64_t base, extra;

  MQA_HOST_DEVICE Split(int64_t total, int64_t workers)
      // 32-bit division is several times faster on a GPU.
      : base(total <= UINT32_MAX ? static_cast<uint32_t>(total) / static_cast<uint32_t>(workers) : total / workers),
        extra(total - base * workers) {}

  // The unit (counted over all requests) at which worker i starts.
  MQA_HOST_DEVICE int64_t start(int64_t i) const { return i * base + (i < extra ? i : extra); }

  // The first worker that starts at `unit` or later; `unit` is at most the total.
  MQA_HOST_DEVICE int64_t first_worker(int64_t unit) const {
    const int64_t long_runs = extra * (base + 1);
    if (unit <= long_runs) return (unit + base) / (base + 1);
    return extra + (unit - long_runs + base - 1) / base;
  }
};

}  // namespace mqa::paged_logits
