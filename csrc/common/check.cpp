#include "common/check.h"

#include <algorithm>
#include <utility>

namespace mqa {
namespace {

struct Dimension {
  int64_t size;
  int64_t stride;  // bytes
};

// A tensor as runs of adjacent bytes, one run per index of `outer` (largest stride first).
struct Runs {
  uintptr_t base = 0;
  int64_t length = 0;  // bytes of one run; 0 for an empty tensor
  std::vector<Dimension> outer;

  uintptr_t end() const {
    uintptr_t last = base + length;
    for (const Dimension& dimension : outer) last += (dimension.size - 1) * dimension.stride;
    return last;
  }
};

Runs runs_of(const Tensor& tensor) {
  Runs runs;
  if (tensor.numel() == 0) return runs;
  runs.base = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  runs.length = static_cast<int64_t>(tensor.element_size());
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1) runs.outer.push_back({tensor.size(dim), tensor.stride(dim) * runs.length});
  }
  std::sort(runs.outer.begin(), runs.outer.end(), [](auto& a, auto& b) { return a.stride > b.stride; });
  while (!runs.outer.empty() && runs.outer.back().stride == runs.length) {
    runs.length *= runs.outer.back().size;
    runs.outer.pop_back();
  }
  return runs;
}

// Does any run, from dimension `depth` on and starting at `base`, meet the bytes [low, high)? `span` bytes from `base`
// bound the runs below. Strides are sorted and do not overlap, so only two neighbours per level can meet a short range.
bool meets(const Runs& runs, size_t depth, uintptr_t base, uintptr_t low, uintptr_t high) {
  if (depth == runs.outer.size()) return base < high && low < base + runs.length;
  int64_t inner = runs.length;
  for (size_t i = depth + 1; i < runs.outer.size(); ++i) inner += (runs.outer[i].size - 1) * runs.outer[i].stride;
  const auto [size, stride] = runs.outer[depth];
  if (high <= base) return false;
  const int64_t ahead = static_cast<int64_t>(low) - static_cast<int64_t>(base) - inner;
  const int64_t first = ahead < 0 ? 0 : ahead / stride + 1;
  const int64_t last = std::min<int64_t>(size - 1, (static_cast<int64_t>(high - base) - 1) / stride);
  for (int64_t i = first; i <= last; ++i) {
    if (meets(runs, depth + 1, base + i * stride, low, high)) return true;
  }
  return false;
}

bool any_run_meets(const Runs& written, const Runs& other, size_t depth, uintptr_t base) {
  if (depth == other.outer.size()) return meets(written, 0, written.base, base, base + other.length);
  for (int64_t i = 0; i < other.outer[depth].size; ++i) {
    if (any_run_meets(written, other, depth + 1, base + i * other.outer[depth].stride)) return true;
  }
  return false;
}

}  // namespace

PagedCache check_cache(const char* op, const char* name, const Tensor& cache, CacheFormat format, int64_t head_dim,
                       bool interleaved_scales) {
  const bool fp8 = format == CacheFormat::kFp8;
  const char* shape = fp8 ? "[blocks, S, 1, D + 4]" : "[blocks, S, 1, D/2 + D/32]";
  PagedCache pool{};
  pool.value_bytes = static_cast<int>(fp8 ? head_dim : head_dim / 2);
  pool.scale_bytes = static_cast<int>(fp8 ? sizeof(float) : head_dim / 32);
  check_rank(op, name, cache, 4, shape);
  check_dtype(op, name, cache, {ScalarType::Byte});
  pool.num_blocks = cache.size(0);
  pool.block_size = cache.size(1);
  check_choice(op, (std::string(name) + " must have S").c_str(), pool.block_size, {16, 32, 64, 128, 256});
  check_shape(op, name, cache, shape, {pool.num_blocks, pool.block_size, 1, pool.value_bytes + pool.scale_bytes});
  check_inner_contiguous(op, name, cache, 3);
  pool.block_stride = cache.stride(0);
  if (pool.num_blocks > 1 && pool.block_stride % 16 != 0) {
    refuse(op, name, " must have a block stride that is a multiple of 16 bytes, got ", pool.block_stride);
  }
  if (interleaved_scales && pool.block_size != 128) {
    refuse(op, "is_kv_sf_interleaved must be False unless ", name, " has S = 128, got True with S = ", pool.block_size);
  }
  pool.interleaved_scales = interleaved_scales;
  for (pool.block_shift = 0; int64_t{1} << pool.block_shift < pool.block_size;) ++pool.block_shift;
  pool.data = cache.const_data_ptr<uint8_t>();
  check_aligned(op, name, cache, 16);
  return pool;
}

void check_no_internal_overlap(const char* op, const char* name, const Tensor& tensor) {
  const Runs runs = runs_of(tensor);
  int64_t inner = runs.length;
  for (auto dimension = runs.outer.rbegin(); dimension != runs.outer.rend(); ++dimension) {
    if (dimension->stride < inner) {
      refuse(op, name, " must not overlap itself, got shape ", list_text(tensor.sizes()), " with strides ",
             list_text(tensor.strides()));
    }
    inner += (dimension->size - 1) * dimension->stride;
  }
}

void check_disjoint(const char* op, const char* name, const Tensor& written, const char* other_name,
                    const Tensor& other) {
  const Runs a = runs_of(written);
  const Runs b = runs_of(other);
  if (a.length == 0 || b.length == 0 || a.end() <= b.base || b.end() <= a.base) return;
  if (any_run_meets(a, b, 0, b.base)) {
    refuse(op, name, " must not overlap ", other_name, ", got memory shared by both");
  }
}

}  // namespace mqa
