// Argument checks, allocation and parameters of the selection ops; compiled into the CPU and the CUDA library, which
// both reject the same arguments in the same words. The op templates at the foot join them to a library's kernels.
#pragma once

#include "common/stable.h"
#include "selection/params.h"

namespace mqa::selection {

// The arguments of a call.
struct TopkArguments {
  const Tensor& logits;
  const Tensor& lengths;
  int64_t k;
  const OptionalTensor& starts;
  const OptionalTensor& block_tables;
  std::optional<int64_t> block_size;
};

TopkParams check_topk(const TopkArguments& in);
void check_topk_out(TopkParams& params, const TopkArguments& in, const Tensor& out);
Tensor allocate_topk(TopkParams& params, const Tensor& logits);

// A library's kernel; `anchor` is a tensor on the device to run on.
using RunTopk = void (*)(const TopkParams& params, const Tensor& anchor);

template <RunTopk run>
Tensor topk_indices(const Tensor& logits, const Tensor& lengths, int64_t k, OptionalTensor starts,
                    OptionalTensor block_tables, std::optional<int64_t> block_size) {
  TopkParams params = check_topk({logits, lengths, k, starts, block_tables, block_size});
  const Tensor out = allocate_topk(params, logits);
  run(params, logits);
  return out;
}

template <RunTopk run>
void topk_indices_out(const Tensor& logits, const Tensor& lengths, int64_t k, OptionalTensor starts,
                      OptionalTensor block_tables, std::optional<int64_t> block_size, Tensor out) {
  const TopkArguments in{logits, lengths, k, starts, block_tables, block_size};
  TopkParams params = check_topk(in);
  check_topk_out(params, in, out);
  run(params, logits);
}

}  // namespace mqa::selection
