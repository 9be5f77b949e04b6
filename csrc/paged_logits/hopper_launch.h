// The Hopper kernel's launch: tensor maps, shared memory, split of the work.
#pragma once

#include <cudaTypedefs.h>

#include <algorithm>

#include "device/launch.h"
#include "paged_logits/hopper.cuh"
#include "paged_logits/hopper.h"
#include "paged_logits/hopper_config.h"
#include "paged_logits/schedule.h"

namespace mqa::paged_logits {

inline PFN_cuTensorMapEncodeTiled_v12000 encode_tiled() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    STD_CUDA_CHECK(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
#else
    STD_CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result));
#endif
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  return function;
}

// Describes a tensor of bytes, innermost dimension first, to be fetched in boxes swizzled by their innermost size;
// false where that is not possible.
template <int kRank>
bool describe(CUtensorMap& map, const void* data, const cuuint64_t (&sizes)[kRank],
              const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  cuuint32_t steps[kRank];
  std::fill_n(steps, kRank, 1);
  const CUtensorMapSwizzle swizzle = box[0] == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                    : CU_TENSOR_MAP_SWIZZLE_32B;
  return encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, kRank, const_cast<void*>(data), sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

inline cuuint64_t unsigned_size(int64_t size) { return static_cast<cuuint64_t>(size); }

inline bool describe_keys(CUtensorMap& map, const LogitsParams& p) {
  // The stride of a single block is free to be anything.
  const int64_t block_stride =
      p.cache.num_blocks > 1 ? p.cache.block_stride : align_up(static_cast<int>(p.cache.block_size * p.head_dim), 16);
  const auto head_dim = static_cast<cuuint32_t>(p.head_dim);
  return describe<3>(map, p.cache.data,
                     {head_dim, unsigned_size(p.cache.block_size), unsigned_size(p.cache.num_blocks)},
                     {head_dim, unsigned_size(block_stride)},
                     {head_dim, static_cast<cuuint32_t>(std::min<int64_t>(p.cache.block_size, kMatrixRows)), 1});
}

inline bool describe_queries(CUtensorMap& map, const LogitsParams& p) {
  const int64_t slot_bytes = p.heads * p.head_dim;
  const int64_t slot_stride = p.next_n > 1 ? p.q_slot_stride : slot_bytes;
  const int64_t batch_stride = p.batch > 1 ? p.q_batch_stride : p.next_n * slot_bytes;
  const auto head_dim = static_cast<cuuint32_t>(p.head_dim);
  return describe<4>(map, p.q, {head_dim, unsigned_size(p.heads), unsigned_size(p.next_n), unsigned_size(p.batch)},
                     {head_dim, unsigned_size(slot_stride), unsigned_size(batch_stride)},
                     {head_dim, static_cast<cuuint32_t>(p.heads), 1, 1});
}

template <typename Kernel, int kGroups, int kBlocks>
bool launch(LogitsParams& p, const Tensor& anchor, int device) {
  constexpr auto kernel = hopper_logits_kernel<Kernel, kGroups, kBlocks>;
  const device::KernelFacts& facts = device::kernel_facts<kernel>(device);
  // Code that was compiled from older PTX on the spot has no Hopper kernel in it.
  if (facts.binary_version != 90 || facts.ptx_version != 90 || p.cache.num_blocks == 0) return false;
  constexpr int kReservedShared = 1024;  // by the system, of each block
  const int shared_limit = (facts.dynamic_shared_limit + kReservedShared) / kBlocks - kReservedShared;
  const int slots = align_up(static_cast<int>(p.next_n), Kernel::kSlotsOfSet);
  HopperPlan plan = hopper_plan<typename Kernel::TileShape>(slots, p.heads, p.head_dim, kGroups, shared_limit);
  if (plan.stages == 0) return false;
  CUtensorMap keys{}, queries{};
  if constexpr (Kernel::kFp8) {
    if (!describe_keys(keys, p)) return false;
    plan.query_boxes = describe_queries(queries, p);
  }

  // Small batches are split in the kernel, by tiles instead of units: finer, and no slower than reading a schedule.
  constexpr int64_t kMaxSplitBatch = 1024;
  const int64_t tiles = p.batch * ((p.capacity + Kernel::kTileTokens - 1) / Kernel::kTileTokens);
  Tensor scratch;
  if (p.batch <= kMaxSplitBatch && tiles <= INT32_MAX) {
    p.schedule = nullptr;
  } else if (p.schedule == nullptr) {
    p.workers = facts.multiprocessors;
    scratch = torch::stable::new_empty(anchor, {p.workers + 1, 2}, ScalarType::Int);
    auto* schedule = scratch.mutable_data_ptr<int32_t>();
    launch_schedule({p.lengths, p.workers, schedule}, device);
    p.schedule = schedule;
  }

  // Where two blocks fit, the second place is worth more to the next kernel, unless there is much to do in this one.
  constexpr int64_t kManyTiles = 256;  // at most, per multiprocessor
  const bool fill = tiles > kManyTiles * facts.multiprocessors;
  plan.guesses = kBlocks > 1 && !fill;
  const int blocks = facts.multiprocessors * (fill ? kBlocks : 1);
  device::launch(kernel, {blocks, (kGroups + 1) * kGroupThreads, plan.shared_bytes, true}, device, p, keys, queries,
                 plan);
  return true;
}

// function<D, H> for the head counts there are.
#define MQA_FOR_HEADS(function, D, p, anchor, device)    \
  switch ((p).heads) {                                   \
    case 8: return function<D, 8>(p, anchor, device);    \
    case 16: return function<D, 16>(p, anchor, device);  \
    case 32: return function<D, 32>(p, anchor, device);  \
    case 64: return function<D, 64>(p, anchor, device);  \
    default: return function<D, 128>(p, anchor, device); \
  }

}  // namespace mqa::paged_logits
