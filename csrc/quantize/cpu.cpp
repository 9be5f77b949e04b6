// Quantisers and cache movers on the CPU. Written as their recipes read.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/cpu.h"
#include "quantize/host.h"

namespace mqa::quantize {
namespace {

constexpr int64_t kMaxHeadDim = 128;
constexpr int64_t kGrain = 64;  // rows a thread should have at least

// NaN elements do not count.
float amax_of(const float* values, int64_t count) {
  float amax = 1e-4f;
  for (int64_t i = 0; i < count; ++i) amax = std::fmax(amax, std::fabs(values[i]));
  return amax;
}

// The smallest e for which 2^e is no less than x.
int exponent_above(float x) {
  int exponent;
  const float fraction = std::frexp(x, &exponent);  // x = fraction * 2^exponent, fraction in [0.5, 1)
  return fraction == 0.5f ? exponent - 1 : exponent;
}

void load_row(const Rows& rows, int64_t row, float* values) {
  const int64_t offset = rows.offsets(row);
  for (int64_t i = 0; i < rows.head_dim; ++i) values[i] = load_float(rows.data, rows.type, offset + i);
}

// FP8

// max(amax, 1e-4) / 448, optionally up to a power of two. An infinite amax takes the largest finite scale of its kind.
float fp8_scale(const float* values, int64_t count, bool pow2_scale) {
  const float amax = amax_of(values, count);
  if (std::isinf(amax)) return pow2_scale ? 0x1p127f : FLT_MAX;
  const float scale = amax / 448.f;
  return pow2_scale ? std::ldexp(1.f, exponent_above(scale)) : scale;
}

uint8_t e4m3_from_float(float value) {
  if (std::isnan(value)) return 0x7f;
  return torch::headeronly::Float8_e4m3fn(std::clamp(value, -448.f, 448.f)).x;
}

// Quantises a row and returns its scale.
float quantise_fp8(const Rows& rows, int64_t row, bool pow2_scale, uint8_t* codes) {
  float values[kMaxHeadDim];
  load_row(rows, row, values);
  const float scale = fp8_scale(values, rows.head_dim, pow2_scale);
  for (int64_t i = 0; i < rows.head_dim; ++i) codes[i] = e4m3_from_float(values[i] / scale);
  return scale;
}

void run_quantize_q_fp8(const QuantizeQFp8Params& p, const Tensor&) {
  torch::stable::parallel_for(0, p.q.count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float scale = quantise_fp8(p.q, row, p.pow2_scale, p.q_fp8 + p.q_fp8_offsets(row));
      const float weight = p.weights == nullptr ? 1.f : load_float(p.weights, p.weights_type, p.weights_offsets(row));
      p.weights_f32[p.weights_f32_offsets(row)] = weight * scale * p.softmax_scale;
    }
  });
}

// MXFP4

// The UE8M0 code of max(amax, 1e-4) / 6 up to a power of two.
uint8_t mxfp4_scale(const float* values) {
  const float amax = amax_of(values, kGroup);
  return std::isinf(amax) ? 254 : static_cast<uint8_t>(127 + exponent_above(amax / 6.f));
}

// The nearest e2m1 code, ties towards zero; never minus zero. NaN is larger than nothing.
uint8_t e2m1_from_float(float value) {
  const float magnitude = std::fabs(value);
  uint8_t code = 0;
  for (const float middle : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.f}) code += magnitude > middle;
  return code != 0 && value < 0.f ? code | 8 : code;
}

// Quantises a row and returns its scales.
uint32_t quantise_mxfp4(const Rows& rows, int64_t row, uint8_t* codes) {
  float values[kMaxHeadDim];
  load_row(rows, row, values);
  uint32_t scales = rows.head_dim < kMaxHeadDim ? kNoScales : 0;
  for (int64_t group = 0; group < rows.head_dim / kGroup; ++group) {
    const float* of_group = values + group * kGroup;
    const uint8_t scale = mxfp4_scale(of_group);
    scales |= static_cast<uint32_t>(scale) << (8 * group);
    for (int64_t i = 0; i < kGroup; i += 2) {
      // Exact, but where it underflows, and then the code is 0 either way.
      const auto code = [&](int64_t at) { return e2m1_from_float(std::ldexp(of_group[at], 127 - scale)); };
      codes[(group * kGroup + i) / 2] = static_cast<uint8_t>(code(i) | code(i + 1) << 4);
    }
  }
  return scales;
}

void run_quantize_q_mxfp4(const QuantizeQMxfp4Params& p, const Tensor&) {
  torch::stable::parallel_for(0, p.q.count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      p.q_sf[p.q_sf_offsets(row)] = quantise_mxfp4(p.q, row, p.q_fp4 + p.q_fp4_offsets(row));
    }
  });
}

// Caches

template <CacheFormat format>
void run_quantize_k(const QuantizeKParams& p, const Tensor&) {
  // All claim, one token after another, before any writes: the last token of a slot holds it when the threads start.
  for (int64_t token = 0; token < p.k.count; ++token) {
    if (!slot_exists(p.cache, p.slots[token])) continue;
    const uint64_t tag = claim_tag(format, token, p.nonce);
    std::memcpy(p.written + slot_values(p.cache, p.slots[token]), &tag, sizeof(tag));
  }
  // Which tokens won must be known before the first values replace a tag.
  std::vector<uint8_t> wins(p.k.count);
  for (int64_t token = 0; token < p.k.count; ++token) {
    if (!slot_exists(p.cache, p.slots[token])) continue;
    uint64_t tag;
    std::memcpy(&tag, p.written + slot_values(p.cache, p.slots[token]), sizeof(tag));
    wins[token] = tag == claim_tag(format, token, p.nonce);
  }
  torch::stable::parallel_for(0, p.k.count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      if (!wins[token]) continue;
      uint8_t* values = p.written + slot_values(p.cache, p.slots[token]);
      uint8_t* scales = p.written + slot_scales(p.cache, p.slots[token]);
      if constexpr (format == CacheFormat::kFp8) {
        const float scale = quantise_fp8(p.k, token, p.pow2_scale, values);
        std::memcpy(scales, &scale, sizeof(scale));
      } else {
        const uint32_t codes = quantise_mxfp4(p.k, token, values);
        std::memcpy(scales, &codes, p.cache.scale_bytes);
      }
    }
  });
}

void run_gather_k(const GatherKParams& p, const Tensor&) {
  // The request of each row: the lowest that covers it.
  std::vector<int64_t> owners(p.total_tokens, -1);
  for (int64_t request = p.batch - 1; request >= 0; --request) {
    const int64_t first = std::clamp<int64_t>(p.cu_seq_lens[request], 0, p.total_tokens);
    const int64_t last = std::clamp<int64_t>(p.cu_seq_lens[request + 1], first, p.total_tokens);
    std::fill(owners.begin() + first, owners.begin() + last, request);
  }
  torch::stable::parallel_for(0, p.total_tokens, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t page = -1;
      int64_t token = 0;
      if (owners[row] >= 0) {
        token = row - p.cu_seq_lens[owners[row]];
        const int64_t column = token >> p.cache.block_shift;
        if (column < p.table_width) page = p.block_tables[owners[row] * p.table_stride + column];
      }
      uint8_t* values = p.k + row * p.k_stride;
      if (page < 0 || page >= p.cache.num_blocks) {
        std::memset(values, 0, p.cache.value_bytes);
        p.k_scale[row] = 0;
        continue;
      }
      const int64_t slot = page * p.cache.block_size + (token & (p.cache.block_size - 1));
      std::memcpy(values, p.cache.data + slot_values(p.cache, slot), p.cache.value_bytes);
      p.k_scale[row] = kNoScales;
      std::memcpy(&p.k_scale[row], p.cache.data + slot_scales(p.cache, slot), p.cache.scale_bytes);
    }
  });
}

}  // namespace
}  // namespace mqa::quantize

STABLE_TORCH_LIBRARY_IMPL(mqa, CPU, m) {
  using namespace mqa::quantize;
  using mqa::CacheFormat;
  m.impl("quantize_q_fp8", TORCH_BOX(&quantize_q_fp8<run_quantize_q_fp8>));
  m.impl("quantize_q_fp8.out", TORCH_BOX(&quantize_q_fp8_out<run_quantize_q_fp8>));
  m.impl("quantize_q_mxfp4", TORCH_BOX(&quantize_q_mxfp4<run_quantize_q_mxfp4>));
  m.impl("quantize_q_mxfp4.out", TORCH_BOX(&quantize_q_mxfp4_out<run_quantize_q_mxfp4>));
  m.impl("quantize_k_cache_fp8", TORCH_BOX(&quantize_k_cache_fp8<run_quantize_k<CacheFormat::kFp8>>));
  m.impl("quantize_k_cache_mxfp4", TORCH_BOX(&quantize_k_cache_mxfp4<run_quantize_k<CacheFormat::kMxfp4>>));
  m.impl("gather_k_cache_fp8", TORCH_BOX(&gather_k_cache_fp8<run_gather_k>));
  m.impl("gather_k_cache_fp8.out", TORCH_BOX(&gather_k_cache_fp8_out<run_gather_k>));
  m.impl("gather_k_cache_mxfp4", TORCH_BOX(&gather_k_cache_mxfp4<run_gather_k>));
  m.impl("gather_k_cache_mxfp4.out", TORCH_BOX(&gather_k_cache_mxfp4_out<run_gather_k>));
}
