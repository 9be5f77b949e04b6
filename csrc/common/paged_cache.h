// A pool of cache blocks as kernels see it.
#pragma once

#include <cstdint>

namespace mqa {

// What a token takes in a block. FP8: D e4m3 bytes and a float32 scale. MXFP4: D / 2 bytes of two e2m1 codes each (the
// even element low) and a UE8M0 scale byte for every 32 elements.
enum class CacheFormat { kFp8, kMxfp4 };

// A block is the values of its S tokens, token after token, then their scales. Blocks may lie any multiple of 16 bytes
// apart.
struct PagedCache {
  const uint8_t* data;  // 16-byte aligned
  int64_t num_blocks;
  int64_t block_size;    // S, a power of two
  int block_shift;       // log2(S)
  int64_t block_stride;  // bytes
  int value_bytes;       // of a token
  int scale_bytes;       // of a token
  // The scales of a token t of the block stand in place 4 (t % 32) + t / 32 instead of t; S is 128.
  bool interleaved_scales;
};

}  // namespace mqa
