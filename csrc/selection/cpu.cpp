// Selection on the CPU: one walk over a row gathers the elements that may be among the k largest, most of them kept out
// by a bound that samples of the row give; what they come to is decided when they are many, and at the end.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "common/cpu.h"
#include "selection/host.h"

namespace mqa::selection {
namespace {

// Elements whose keys are made together.
constexpr int kRun = 256;
using Keys = std::array<uint32_t, kRun>;

inline uint32_t order_bits(float element) {
  uint32_t bits;
  std::memcpy(&bits, &element, sizeof(bits));
  return bits;
}
inline uint32_t order_bits(torch::headeronly::BFloat16 element) { return order_bits_of_bfloat16(element.x); }
inline uint32_t order_bits(torch::headeronly::Half element) { return order_bits_of_float16(element.x); }

// The keys of `count` elements, and the largest of them. In two loops: the compiler makes no vector code of one.
template <typename Element>
MQA_CPU_CLONES uint32_t make_keys(const Element* elements, int64_t count, uint32_t* keys) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) keys[i] = order_key(order_bits(elements[i]));
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, keys[i]);
  return largest;
}

template <typename Element>
class RowSelector {
 public:
  explicit RowSelector(const TopkParams& params)
      : p(params), keys(2 * p.k + kSpare), positions(keys.size()), scratch(keys.size()) {}

  void select(int64_t row) {
    const Span span = p.span(row);
    elements = static_cast<const Element*>(p.logits) + row * p.row_stride + span.start;
    length = span.length;
    held = 0;
    if (length <= p.k) {
      held = length;
      std::iota(positions.begin(), positions.begin() + length, 0);
    } else {
      gather(sampled_bound());
      if (held < p.k) gather(kNanKey);  // the samples misled
      keep_largest();
    }
    int32_t* out = p.out + row * p.out_stride;
    const int32_t* table = p.table(row);
    int64_t written = 0;
    for (int64_t i = 0; i < held; ++i) {
      const int32_t result = p.result(table, static_cast<uint32_t>(positions[i]));
      if (result >= 0) out[written++] = result;
    }
    std::fill(out + written, out + p.k, -1);
  }

 private:
  static constexpr int64_t kRun = 256;  // elements whose keys are made together
  static constexpr int64_t kSpare = 4096;
  static constexpr int64_t kMostSamples = 1024;

  const TopkParams& p;
  const Element* elements;
  int64_t length;
  // Elements that may be among the k largest, in order of position.
  int64_t held;
  std::vector<uint32_t> keys;
  std::vector<int32_t> positions;
  std::vector<uint32_t> scratch;

  // A key that probably no less than k reach, and not many more.
  uint32_t sampled_bound() {
    const int64_t samples = std::min(kMostSamples, length / 16), step = length / std::max<int64_t>(samples, 1);
    const double share = static_cast<double>(p.k) / length * samples;
    const auto rank = static_cast<int64_t>(share + 4 * std::sqrt(share) + 4);
    if (rank >= samples) return kNanKey;
    for (int64_t i = 0; i < samples; ++i) scratch[i] = order_key(order_bits(elements[i * step]));
    std::nth_element(scratch.begin(), scratch.begin() + rank, scratch.begin() + samples, std::greater<>());
    return scratch[rank];
  }

  // All elements whose keys reach `bound`, or the k largest.
  void gather(uint32_t bound) {
    held = 0;
    std::array<uint32_t, kRun> run;
    for (int64_t first = 0; first < length; first += kRun) {
      const int64_t count = std::min(kRun, length - first);
      if (make_keys(elements + first, count, run.data()) < bound) continue;
      // Later elements with the smallest of the keys that are kept come too late.
      if (held + count > static_cast<int64_t>(keys.size())) bound = std::max(bound, keep_largest() + 1);
      for (int64_t i = 0; i < count; ++i) {
        keys[held] = run[i];
        positions[held] = static_cast<int32_t>(first + i);
        held += run[i] >= bound;
      }
    }
  }

  // Of no less than k elements, the k that come first. Returns the smallest of their keys.
  uint32_t keep_largest() {
    uint32_t smallest = *std::min_element(keys.begin(), keys.begin() + held);
    int64_t ties = p.k - (held - std::count(keys.begin(), keys.begin() + held, smallest));
    if (ties <= 0) {
      std::copy_n(keys.begin(), held, scratch.begin());
      const auto last = scratch.begin() + p.k - 1;
      std::nth_element(scratch.begin(), last, scratch.begin() + held, std::greater<>());
      smallest = *last;
      ties = std::count(scratch.begin(), last + 1, smallest);
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < held; ++i) {
      const uint32_t key = keys[i];
      keys[kept] = key;
      positions[kept] = positions[i];
      const bool tie = key == smallest && ties > 0;
      ties -= tie;
      kept += key > smallest || tie;
    }
    held = kept;
    return smallest;
  }
};

template <typename Element>
void select_rows(const TopkParams& p) {
  torch::stable::parallel_for(0, p.rows, 1, [&](int64_t begin, int64_t end) {
    RowSelector<Element> selector(p);
    for (int64_t row = begin; row < end; ++row) selector.select(row);
  });
}

void run_topk(const TopkParams& p, const Tensor&) {
  switch (p.type) {
    case FloatType::kBFloat16: return select_rows<torch::headeronly::BFloat16>(p);
    case FloatType::kFloat16: return select_rows<torch::headeronly::Half>(p);
    default: return select_rows<float>(p);
  }
}

}  // namespace
}  // namespace mqa::selection

STABLE_TORCH_LIBRARY_IMPL(mqa, CPU, m) {
  using namespace mqa::selection;
  m.impl("topk_indices", TORCH_BOX(&topk_indices<run_topk>));
  m.impl("topk_indices.out", TORCH_BOX(&topk_indices_out<run_topk>));
}
