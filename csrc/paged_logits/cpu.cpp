// Paged logits and their schedule on the CPU: float32, torch's matmul for the products, memory bounded by a tile.
//
// The work is cut into units of 256 tokens dealt out over torch's threads. A thread dequantises one unit of K,
// multiplies it with the heads of one slot and sums over heads. Every product has the same shape whatever the lengths
// (missing tokens are zero rows), so a score's bits depend on nothing around it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "common/cpu.h"
#include "paged_logits/host.h"

namespace mqa::paged_logits {
namespace {

constexpr float kAbsent = -std::numeric_limits<float>::infinity();

// e4m3 to float32, exact, NaN stays NaN. Written without branches so that it becomes vector code: normals move their
// exponent from bias 7 to 127; subnormals m / 8 * 2^-6 are first read as 2^-7 (1 + m / 8).
MQA_CPU_CLONES void dequantise(const uint8_t* codes, float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t code = codes[i];
    const uint32_t magnitude = code & 0x7f;
    const uint32_t moved = (magnitude << 20) + (120u << 23);
    float value;
    std::memcpy(&value, &moved, sizeof(value));
    const float subnormal = (value - 0.0078125f) * 2.f;
    value = magnitude < 8 ? subnormal : value;
    value = magnitude == 0x7f ? std::numeric_limits<float>::quiet_NaN() : value;
    values[i] = code & 0x80 ? -value : value;
  }
}

constexpr int kNoExponent = std::numeric_limits<int>::min();  // of a row that is zero or NaN

// An MXFP4 row, each element relative to 2^e, and e: the exponent of the largest scale among the groups that are not
// zero, so that nothing overflows and what underflows is 2^-126 times smaller than the row's largest element. A NaN
// scale makes the row NaN.
int dequantise_mxfp4(const uint8_t* codes, const uint8_t* scales, float* values, int64_t head_dim) {
  constexpr int64_t kGroup = 32;
  constexpr float kMagnitudes[8] = {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
  constexpr int kNan = 255, kBias = 127;
  const auto is_zero = [&](int64_t group) {
    const uint8_t* bytes = codes + group * kGroup / 2;
    return std::all_of(bytes, bytes + kGroup / 2, [](uint8_t pair) { return (pair & 0x77) == 0; });
  };
  int largest = -1;
  for (int64_t group = 0; group < head_dim / kGroup; ++group) {
    if (scales[group] == kNan) {
      std::fill_n(values, head_dim, std::numeric_limits<float>::quiet_NaN());
      return kNoExponent;
    }
    if (!is_zero(group)) largest = std::max<int>(largest, scales[group]);
  }
  if (largest < 0) {
    std::fill_n(values, head_dim, 0.f);
    return kNoExponent;
  }
  for (int64_t group = 0; group < head_dim / kGroup; ++group) {
    const float scale = is_zero(group) ? 0.f : std::ldexp(1.f, scales[group] - largest);
    for (int64_t i = group * kGroup; i < (group + 1) * kGroup; ++i) {
      const int code = codes[i / 2] >> (i % 2 * 4) & 15;
      values[i] = (code & 8 ? -1.f : 1.f) * kMagnitudes[code & 7] * scale;
    }
  }
  return largest - kBias;
}

// weights[head] * 2^exponents[head] relative to 2^e, which is no less than any of them, and e. Weights that are not
// finite stay; those of rows without an exponent, which multiply 0 or NaN, become 0 if they are finite.
int normalise_weights(float* weights, const int* exponents, int64_t heads) {
  int largest = kNoExponent;
  for (int64_t head = 0; head < heads; ++head) {
    if (!std::isfinite(weights[head]) || weights[head] == 0.f || exponents[head] == kNoExponent) continue;
    int exponent;
    std::frexp(weights[head], &exponent);
    largest = std::max(largest, exponent + exponents[head]);
  }
  for (int64_t head = 0; head < heads; ++head) {
    if (!std::isfinite(weights[head])) continue;
    const bool vanishes = weights[head] == 0.f || exponents[head] == kNoExponent;
    weights[head] = vanishes ? 0.f : std::ldexp(weights[head], exponents[head] - largest);
  }
  return largest == kNoExponent ? 0 : largest;
}

// sums[token] = sum over heads of weight * max(score, 0), heads in order; NaN passes through the rectifier.
MQA_CPU_CLONES void sum_over_heads(const float* scores, const float* weights, int64_t heads, float* sums) {
  std::fill(sums, sums + kUnitTokens, 0.f);
  for (int64_t head = 0; head < heads; ++head) {
    const float weight = weights[head];
    const float* row = scores + head * kUnitTokens;
    for (int64_t token = 0; token < kUnitTokens; ++token) sums[token] += weight * (row[token] < 0.f ? 0.f : row[token]);
  }
}

int64_t length_at(const Lengths& lengths, int64_t request, int64_t slot) {
  return lengths.data[request * lengths.batch_stride + slot * lengths.slot_stride];
}

// The longest of a request's lengths, not below 0.
int64_t request_length(const Lengths& lengths, int64_t request) {
  int64_t longest = 0;
  for (int64_t slot = 0; slot < lengths.slots; ++slot) longest = std::max(longest, length_at(lengths, request, slot));
  return longest;
}

int64_t units_of(int64_t length) { return (length + kUnitTokens - 1) / kUnitTokens; }

// Columns of row (request, slot) below this are live.
int64_t row_limit(const LogitsParams& p, int64_t request, int64_t slot) {
  const int64_t limit =
      p.lengths_per_slot ? length_at(p.lengths, request, slot) : length_at(p.lengths, request, 0) - p.next_n + slot + 1;
  return std::clamp<int64_t>(limit, 0, p.capacity);
}

// What one thread needs to score a unit.
struct UnitScorer {
  const LogitsParams& p;
  Tensor keys;                 // [256, D]
  Tensor queries;              // [n * H, D]
  Tensor products;             // [H, 256]
  std::vector<float> weights;  // [n * H], relative to 2^slot_exponents
  std::vector<int> slot_exponents;
  std::vector<float> sums;           // [256]
  std::vector<float> scales;         // [256], of FP8
  std::vector<int> token_exponents;  // [256], of MXFP4
  std::vector<uint8_t> absent;
  int64_t queries_of = -1;  // the request whose queries are loaded

  UnitScorer(const LogitsParams& params, const Tensor& anchor)
      : p(params),
        keys(torch::stable::new_empty(anchor, {kUnitTokens, p.head_dim}, ScalarType::Float)),
        queries(torch::stable::new_empty(anchor, {p.next_n * p.heads, p.head_dim}, ScalarType::Float)),
        products(torch::stable::new_empty(anchor, {p.heads, kUnitTokens}, ScalarType::Float)),
        weights(p.next_n * p.heads),
        slot_exponents(p.next_n, 0),
        sums(kUnitTokens),
        scales(kUnitTokens),
        token_exponents(kUnitTokens),
        absent(kUnitTokens) {}

  void load_queries(int64_t request) {
    if (queries_of == request) return;
    queries_of = request;
    std::vector<int> exponents(p.heads, 0);
    for (int64_t slot = 0; slot < p.next_n; ++slot) {
      const uint8_t* codes = p.q + request * p.q_batch_stride + slot * p.q_slot_stride;
      float* values = queries.mutable_data_ptr<float>() + slot * p.heads * p.head_dim;
      float* slot_weights = &weights[slot * p.heads];
      for (int64_t head = 0; head < p.heads; ++head) {
        slot_weights[head] =
            load_float(p.weights, p.weights_type, (request * p.next_n + slot) * p.weights_stride + head);
      }
      if (p.format == CacheFormat::kFp8) {
        dequantise(codes, values, p.heads * p.head_dim);
        continue;
      }
      const uint32_t* scale_words = p.q_scales + request * p.q_scales_batch_stride + slot * p.q_scales_slot_stride;
      for (int64_t head = 0; head < p.heads; ++head) {
        uint8_t head_scales[sizeof(uint32_t)];
        std::memcpy(head_scales, scale_words + head, sizeof(head_scales));
        exponents[head] =
            dequantise_mxfp4(codes + head * p.head_dim / 2, head_scales, values + head * p.head_dim, p.head_dim);
      }
      slot_exponents[slot] = normalise_weights(slot_weights, exponents.data(), p.heads);
    }
  }

  // Tokens [first, first + count) of a request; further rows of the tile become zero.
  void load_keys(int64_t request, int64_t first, int64_t count) {
    float* values = keys.mutable_data_ptr<float>();
    for (int64_t token = 0; token < count;) {
      const int64_t in_block = (first + token) % p.cache.block_size;
      const int64_t run = std::min(count - token, p.cache.block_size - in_block);
      const int64_t page = p.block_tables[request * p.table_stride + (first + token) / p.cache.block_size];
      const bool missing = page < 0 || page >= p.cache.num_blocks;
      std::fill_n(absent.begin() + token, run, missing);
      if (missing) {
        std::fill_n(values + token * p.head_dim, run * p.head_dim, 0.f);
      } else if (p.format == CacheFormat::kMxfp4) {
        const uint8_t* block = p.cache.data + page * p.cache.block_stride;
        for (int64_t i = 0; i < run; ++i) {
          const int64_t at = in_block + i;
          token_exponents[token + i] = dequantise_mxfp4(
              block + at * p.cache.value_bytes,
              block + p.cache.block_size * p.cache.value_bytes + p.cache.scale_place(at) * p.cache.scale_bytes,
              values + (token + i) * p.head_dim, p.head_dim);
        }
      } else {
        const uint8_t* block = p.cache.data + page * p.cache.block_stride;
        dequantise(block + in_block * p.head_dim, values + token * p.head_dim, run * p.head_dim);
        std::memcpy(&scales[token], block + p.cache.block_size * p.head_dim + in_block * sizeof(float),
                    run * sizeof(float));
      }
      token += run;
    }
    std::fill(values + count * p.head_dim, values + kUnitTokens * p.head_dim, 0.f);
  }

  float scaled(float sum, int64_t token, int64_t slot) const {
    if (p.format == CacheFormat::kFp8) return sum * scales[token];
    // A row without an exponent has sums that no scale changes.
    const int exponent = token_exponents[token] == kNoExponent ? 0 : token_exponents[token];
    return std::ldexp(sum, exponent + slot_exponents[slot]);
  }

  void score(int64_t request, int64_t unit) {
    const int64_t first = unit * kUnitTokens;
    const int64_t limit = std::min(request_length(p.lengths, request), p.capacity);
    load_queries(request);
    load_keys(request, first, std::min<int64_t>(kUnitTokens, limit - first));
    const Tensor columns = torch::stable::transpose(keys, 0, 1);
    for (int64_t slot = 0; slot < p.next_n; ++slot) {
      const int64_t row = request * p.next_n + slot;
      const int64_t live = std::clamp<int64_t>(row_limit(p, request, slot) - first, 0, kUnitTokens);
      if (live == 0) continue;
      Tensor all_queries = queries;
      mm_out(products, torch::stable::narrow(all_queries, 0, slot * p.heads, p.heads), columns);
      sum_over_heads(products.const_data_ptr<float>(), &weights[slot * p.heads], p.heads, sums.data());
      for (int64_t token = 0; token < live; ++token) {
        store_float(p.out, p.out_type, row * p.out_stride + first + token,
                    absent[token] ? kAbsent : scaled(sums[token], token, slot));
      }
    }
  }
};

void run_logits(const LogitsParams& p, const Tensor& anchor) {
  // Units in front of each request.
  std::vector<int64_t> before(p.batch + 1, 0);
  for (int64_t request = 0; request < p.batch; ++request) {
    before[request + 1] = before[request] + units_of(std::min(request_length(p.lengths, request), p.capacity));
  }
  torch::stable::parallel_for(0, before[p.batch], 1, [&](int64_t begin, int64_t end) {
    UnitScorer scorer(p, anchor);
    int64_t request = std::upper_bound(before.begin(), before.end(), begin) - before.begin() - 1;
    for (int64_t item = begin; item < end; ++item) {
      while (item >= before[request + 1]) ++request;
      scorer.score(request, item - before[request]);
    }
  });
  if (!p.clean) return;
  torch::stable::parallel_for(0, p.batch * p.next_n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t column = row_limit(p, row / p.next_n, row % p.next_n); column < p.max_seq_len; ++column) {
        store_float(p.out, p.out_type, row * p.out_stride + column, kAbsent);
      }
    }
  });
}

void run_schedule(const ScheduleParams& p, const Tensor&) {
  int64_t total = 0;
  for (int64_t request = 0; request < p.lengths.batch; ++request) {
    total += units_of(request_length(p.lengths, request));
  }
  const Split split(total, p.workers);
  int64_t request = 0;
  int64_t before = 0;  // units in front of `request`
  for (int64_t worker = 0; worker <= p.workers; ++worker) {
    const int64_t start = split.start(worker);
    while (request < p.lengths.batch && before + units_of(request_length(p.lengths, request)) <= start) {
      before += units_of(request_length(p.lengths, request));
      ++request;
    }
    p.out[2 * worker] = static_cast<int32_t>(request);
    p.out[2 * worker + 1] = static_cast<int32_t>(start - before);
  }
}

}  // namespace
}  // namespace mqa::paged_logits

STABLE_TORCH_LIBRARY_IMPL(mqa, CPU, m) {
  using namespace mqa::paged_logits;
  m.impl("fp8_paged_mqa_logits", TORCH_BOX(&fp8_paged_mqa_logits<run_logits>));
  m.impl("fp8_paged_mqa_logits.out", TORCH_BOX(&fp8_paged_mqa_logits_out<run_logits>));
  m.impl("fp4_paged_mqa_logits", TORCH_BOX(&fp4_paged_mqa_logits<run_logits>));
  m.impl("fp4_paged_mqa_logits.out", TORCH_BOX(&fp4_paged_mqa_logits_out<run_logits>));
  m.impl("paged_mqa_logits_schedule", TORCH_BOX(&paged_mqa_logits_schedule<run_schedule>));
  m.impl("paged_mqa_logits_schedule.out", TORCH_BOX(&paged_mqa_logits_schedule_out<run_schedule>));
}
