// A pool of cache blocks as kernels see it.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MQA_HOST_DEVICE __host__ __device__
#else
#define MQA_HOST_DEVICE
#endif

namespace mqa {

// What a token takes in a block. FP8: D e4m3 bytes and a float32 scale. MXFP4: D / 2 bytes of two e2m1 codes each (the
// even element low) and a UE8M0 scale byte for every 32 elements.
enum class CacheFormat { kFp8, kMxfp4 };

// A block is the values of its S tokens, token after token, then their scales. Blocks may lie any multiple of 16 bytes
// apart.
struct PagedCache {
  const uint8_t* data;  // 16-byte aligned
  int64_t num_blocks;
  int64_t block_size;       // S, a power of two
  int block_shift;          // log2(S)
  int64_t block_stride;     // bytes
  int value_bytes;          // of a token
  int scale_bytes;          // of a token
  bool interleaved_scales;  // S is 128

  // Whose place among the scales a block's token has.
  MQA_HOST_DEVICE int64_t scale_place(int64_t token) const {
    return interleaved_scales ? 4 * (token % 32) + token / 32 : token;
  }
};

}  // namespace mqa
