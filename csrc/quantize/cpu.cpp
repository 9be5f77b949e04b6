// FP8 quantisers and cache movers on the CPU. Written as their recipes read.
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

// max(amax, 1e-4) / 448, optionally up to a power of two. NaN elements do not count; an infinite amax takes the largest
// finite scale of its kind.
float fp8_scale(const float* row, int64_t count, bool pow2_scale) {
  float amax = 1e-4f;
  for (int64_t i = 0; i < count; ++i) amax = std::fmax(amax, std::fabs(row[i]));
  if (std::isinf(amax)) return pow2_scale ? 0x1p127f : FLT_MAX;
  const float scale = amax / 448.f;
  if (!pow2_scale) return scale;
  int exponent;
  const float fraction = std::frexp(scale, &exponent);  // scale = fraction * 2^exponent, fraction in [0.5, 1)
  return std::ldexp(1.f, fraction == 0.5f ? exponent - 1 : exponent);
}

uint8_t e4m3_from_float(float value) {
  if (std::isnan(value)) return 0x7f;
  return torch::headeronly::Float8_e4m3fn(std::clamp(value, -448.f, 448.f)).x;
}

// Quantises one row and returns its scale.
float quantise_row(const void* data, FloatType type, int64_t offset, int64_t count, bool pow2_scale, uint8_t* codes) {
  float row[kMaxHeadDim];
  for (int64_t i = 0; i < count; ++i) row[i] = load_float(data, type, offset + i);
  const float scale = fp8_scale(row, count, pow2_scale);
  for (int64_t i = 0; i < count; ++i) codes[i] = e4m3_from_float(row[i] / scale);
  return scale;
}

void run_quantize_q(const QuantizeQParams& p, const Tensor&) {
  torch::stable::parallel_for(0, p.tokens * p.heads, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t token = row / p.heads;
      const int64_t head = row % p.heads;
      const float scale = quantise_row(p.q, p.q_type, p.q_offsets(token) + head * p.head_dim, p.head_dim, p.pow2_scale,
                                       p.q_fp8 + p.q_fp8_offsets(token) + head * p.head_dim);
      const float weight =
          p.weights == nullptr ? 1.f : load_float(p.weights, p.weights_type, p.weights_offsets(token) + head);
      p.weights_f32[p.weights_f32_offsets(token) + head] = weight * scale * p.softmax_scale;
    }
  });
}

void run_quantize_k(const QuantizeKParams& p, const Tensor&) {
  // One token after another, so that the last token of a slot holds it when the threads start.
  for (int64_t token = 0; token < p.tokens; ++token) {
    if (!slot_exists(p.cache, p.slots[token])) continue;
    const uint32_t tag = claim_tag(token);
    std::memcpy(p.written + slot_scale(p.cache, p.head_dim, p.slots[token]), &tag, sizeof(tag));
  }
  // Which tokens won must be known before the first scale replaces a tag.
  std::vector<uint8_t> wins(p.tokens);
  for (int64_t token = 0; token < p.tokens; ++token) {
    if (!slot_exists(p.cache, p.slots[token])) continue;
    uint32_t tag;
    std::memcpy(&tag, p.written + slot_scale(p.cache, p.head_dim, p.slots[token]), sizeof(tag));
    wins[token] = tag == claim_tag(token);
  }
  torch::stable::parallel_for(0, p.tokens, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      if (!wins[token]) continue;
      const int64_t slot = p.slots[token];
      const float scale = quantise_row(p.k, p.k_type, token * p.k_stride, p.head_dim, p.pow2_scale,
                                       p.written + slot_values(p.cache, p.head_dim, slot));
      std::memcpy(p.written + slot_scale(p.cache, p.head_dim, slot), &scale, sizeof(scale));
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
        std::memset(values, 0, p.head_dim);
        p.k_scale[row] = 0.f;
        continue;
      }
      const int64_t slot = page * p.cache.block_size + (token & (p.cache.block_size - 1));
      std::memcpy(values, p.cache.data + slot_values(p.cache, p.head_dim, slot), p.head_dim);
      std::memcpy(&p.k_scale[row], p.cache.data + slot_scale(p.cache, p.head_dim, slot), sizeof(float));
    }
  });
}

}  // namespace
}  // namespace mqa::quantize

STABLE_TORCH_LIBRARY_IMPL(mqa, CPU, m) {
  using namespace mqa::quantize;
  m.impl("quantize_q_fp8", TORCH_BOX(&quantize_q_fp8<run_quantize_q>));
  m.impl("quantize_q_fp8.out", TORCH_BOX(&quantize_q_fp8_out<run_quantize_q>));
  m.impl("quantize_k_cache_fp8", TORCH_BOX(&quantize_k_cache_fp8<run_quantize_k>));
  m.impl("gather_k_cache_fp8", TORCH_BOX(&gather_k_cache_fp8<run_gather_k>));
  m.impl("gather_k_cache_fp8.out", TORCH_BOX(&gather_k_cache_fp8_out<run_gather_k>));
}
