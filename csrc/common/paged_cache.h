// A pool of FP8 cache blocks as kernels see it.
#pragma once

#include <cstdint>

namespace mqa {

// One block is S*D e4m3 bytes, token after token, then S float32 scales. Blocks may lie any multiple of 16 bytes apart.
struct PagedCache {
  const uint8_t* data;  // 16-byte aligned
  int64_t num_blocks;
  int64_t block_size;    // S, a power of two
  int block_shift;       // log2(S)
  int64_t block_stride;  // bytes
};

}  // namespace mqa
